package daemon

import (
	"math"
	"reflect"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/fair"
	"github.com/iser-target/iser-target/security"
)

// rateKeys are the keys of a LUN that rerate changes.
var rateKeys = []string{"iops", "bandwidth", "burst", "min_iops", "min_bandwidth", "rates"}

// withRates returns l with the rates of next.
func withRates(l, next config.LUN) config.LUN {
	l.IOPS, l.Bandwidth, l.Burst = next.IOPS, next.Bandwidth, next.Burst
	l.MinIOPS, l.MinBandwidth, l.Rates = next.MinIOPS, next.MinBandwidth, next.Rates
	return l
}

// thresholdKeys are the keys of a LUN that rethreshold changes.
var thresholdKeys = []string{"threshold_available", "threshold_used"}

// rethreshold changes the thresholds of the LUN. Initiators keep those that they have set themselves.
func (c *change) rethreshold(t *servedTarget, next config.LUN) {
	l := c.copyOf(t, next.ID)
	was := l.LUN
	if l.ThresholdAvailable, l.ThresholdUsed = next.ThresholdAvailable, next.ThresholdUsed; reflect.DeepEqual(was, l.LUN) {
		return
	}
	l.unit.SetThresholds(int64(l.ThresholdAvailable), int64(l.ThresholdUsed))
	c.onUndo(func() error {
		l.unit.SetThresholds(int64(was.ThresholdAvailable), int64(was.ThresholdUsed))
		return nil
	})
	c.update(t, &l)
}

// rerate changes how fast initiators may use the LUN. Commands in progress end without an error.
func (c *change) rerate(t *servedTarget, next config.LUN) {
	l := c.copyOf(t, next.ID)
	was := l.LUN
	if l.LUN = withRates(was, next); reflect.DeepEqual(was, l.LUN) {
		return
	}
	setRates(l.unit, &l.LUN)
	c.onUndo(func() error {
		setRates(l.unit, &was)
		return nil
	})
	c.update(t, &l)
}

// setRates sets the rates of u, the unit of l: those of all initiators together, and of each one.
func setRates(u *lun.Unit, l *config.LUN) {
	type rule struct {
		who   security.Patterns
		rates fair.Rates
	}
	var rules []rule
	for i := range l.Rates {
		if who, err := security.Compile(l.Rates[i].Initiators); err == nil { // as it is for a valid configuration
			rules = append(rules, rule{who, ratesOf(&l.Rates[i])})
		}
	}
	all := l.Rate()
	var each func(initiator string) fair.Rates // nil: initiators need not be told apart
	if len(rules) > 0 {
		each = func(initiator string) fair.Rates {
			for i := range rules {
				if rules[i].who.Match(initiator) {
					return rules[i].rates
				}
			}
			return fair.Rates{}
		}
	}
	u.SetRates(ratesOf(&all), each)
}

// ratesOf returns a rate of the configuration. A burst is what the limits allow in its time.
func ratesOf(r *config.Rate) fair.Rates {
	burst := func(perSecond int64) int64 { return int64(math.Ceil(float64(perSecond) * r.Burst.Seconds())) }
	return fair.Rates{
		IOPS: int64(r.IOPS), Bandwidth: int64(r.Bandwidth),
		IOPSBurst: burst(int64(r.IOPS)), BandwidthBurst: burst(int64(r.Bandwidth)),
		MinIOPS: int64(r.MinIOPS), MinBandwidth: int64(r.MinBandwidth),
	}
}
