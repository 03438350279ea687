package vm

import (
	"bufio"
	"fmt"
	"io"
	"regexp"
	"strings"
	"sync"
)

// trouble matches what a kernel prints when it has found a fault in itself. No
// input from the network may bring an initiator's kernel there, and what it
// does afterwards proves nothing. "Call Trace" is not among it: the dump of
// hanging processes that ends a script with its time has them, too.
var trouble = regexp.MustCompile(`Kernel panic|BUG:|WARNING:|Oops|KASAN|KCSAN|UBSAN|` +
	`general protection fault|unable to handle|refcount_t:|list_(add|del) corruption|` +
	`blocked for more than|self-detected stall|possible deadlock|use-after-free|double free`)

// tailLines is how much of the console is shown with a failure.
const tailLines = 150

// A console keeps what the guest's kernel and init print.
type console struct {
	log io.Writer // gets all of it

	mu    sync.Mutex
	tail  []string // the last lines
	found []string // lines that match trouble, not yet taken
}

// read reads r until it ends.
func (c *console) read(r io.Reader) {
	br := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := br.ReadSlice('\n')
		if len(line) > 0 {
			c.add(strings.TrimRight(string(line), "\r\n"))
		}
		if err != nil && err != bufio.ErrBufferFull {
			return
		}
	}
}

func (c *console) add(line string) {
	fmt.Fprintln(c.log, line)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tail = append(c.tail, line)
	if len(c.tail) >= 2*tailLines {
		c.tail = append(c.tail[:0:0], c.tail[len(c.tail)-tailLines:]...)
	}
	if trouble.MatchString(line) {
		c.found = append(c.found, line)
	}
}

// trouble returns the lines of the kernel's that tell of a fault and were not
// returned before.
func (c *console) trouble() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	found := c.found
	c.found = nil
	return found
}

// end returns the last lines.
func (c *console) end() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.tail[max(len(c.tail)-tailLines, 0):], "\n")
}
