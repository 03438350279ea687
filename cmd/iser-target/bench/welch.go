package bench

import "math"

// A Summary sums up samples: their number, mean and standard deviation (of the sample).
type Summary struct {
	N               int
	Mean, Deviation float64
}

// Summarize sums up samples.
func Summarize(samples []float64) (s Summary) {
	s.N = len(samples)
	if s.N == 0 {
		return s
	}
	for _, x := range samples {
		s.Mean += x / float64(s.N)
	}
	if s.N > 1 {
		sum := 0.0
		for _, x := range samples {
			sum += (x - s.Mean) * (x - s.Mean)
		}
		s.Deviation = math.Sqrt(sum / float64(s.N-1))
	}
	return s
}

// Welch returns the probability that samples with the same mean differ by as much as a and b or more: the two-sided p-value of
// Welch's t-test. ok is false for less than two samples.
func Welch(a, b Summary) (p float64, ok bool) {
	if a.N < 2 || b.N < 2 {
		return 0, false
	}
	va, vb := a.Deviation*a.Deviation/float64(a.N), b.Deviation*b.Deviation/float64(b.N)
	if va+vb == 0 {
		if a.Mean == b.Mean {
			return 1, true
		}
		return 0, true
	}
	t := (a.Mean - b.Mean) / math.Sqrt(va+vb)
	degrees := (va + vb) * (va + vb) / (va*va/float64(a.N-1) + vb*vb/float64(b.N-1))
	return betaInc(degrees/2, 0.5, degrees/(degrees+t*t)), true
}

// betaInc returns the regularized incomplete beta function I_x(a, b), by its continued fraction (Abramowitz and Stegun, 26.5.8).
func betaInc(a, b, x float64) float64 {
	switch {
	case x <= 0:
		return 0
	case x >= 1:
		return 1
	case x > (a+1)/(a+b+2):
		return 1 - betaInc(b, a, 1-x)
	}
	la, _ := math.Lgamma(a)
	lb, _ := math.Lgamma(b)
	lab, _ := math.Lgamma(a + b)
	front := math.Exp(lab-la-lb+a*math.Log(x)+b*math.Log1p(-x)) / a
	// Lentz's method.
	const tiny = 1e-300
	f, c, d := 1.0, 1.0, 0.0
	for i := range 400 {
		m := float64(i / 2)
		var term float64
		switch {
		case i == 0:
			term = 1
		case i%2 == 0:
			term = m * (b - m) * x / ((a + 2*m - 1) * (a + 2*m))
		default:
			term = -(a + m) * (a + b + m) * x / ((a + 2*m) * (a + 2*m + 1))
		}
		d = 1 + term*d
		if math.Abs(d) < tiny {
			d = tiny
		}
		d = 1 / d
		c = 1 + term/c
		if math.Abs(c) < tiny {
			c = tiny
		}
		f *= c * d
		if math.Abs(1-c*d) < 1e-14 {
			break
		}
	}
	return front * (f - 1)
}
