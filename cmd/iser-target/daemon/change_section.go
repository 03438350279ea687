package daemon

import "github.com/iser-target/iser-target/config"

// updateOptions applies the sections that describe sessions and connections.
func (c *change) updateOptions(config.Change) error {
	c.onUndo(func() error { return c.d.setOptions(c.d.served.cfg) })
	return c.d.setOptions(c.cfg)
}

// setOptions applies what cfg says about sessions and connections, unless it fails.
func (d *Daemon) setOptions(cfg *config.Config) error {
	o, err := d.nodeOptions(cfg)
	if err != nil {
		return err
	}
	d.setLimits(cfg)
	d.node.SetOptions(o)
	return nil
}

// updateLog applies the level of the log, and how long slow commands take.
func (c *change) updateLog(config.Change) error {
	d := c.d
	d.setLog(c.cfg.Log)
	c.onUndo(func() error {
		d.setLog(d.served.cfg.Log)
		return nil
	})
	return nil
}

// updateSideServer moves a side server to its next address.
func (c *change) updateSideServer(ch config.Change) error {
	s := c.d.side[ch.Kind]
	w, err := s.webOf(c.cfg)
	if err != nil {
		return err // the server continues as it is
	}
	c.onUndo(func() error { return s.listen(c.d.served.cfg) })
	return s.open(c.cfg, w)
}
