package daemon

import "github.com/iser-target/iser-target/config"

// updateOptions applies the sections that describe sessions and connections.
func (c *change) updateOptions(config.Change) error {
	d := c.d
	o, err := d.nodeOptions(c.cfg)
	if err != nil {
		return err
	}
	was, err := d.nodeOptions(d.served.cfg)
	if err != nil {
		return err
	}
	d.node.SetOptions(o)
	d.setLimits(c.cfg)
	c.onUndo(func() error {
		d.node.SetOptions(was)
		d.setLimits(d.served.cfg)
		return nil
	})
	return nil
}

// updateLog applies the level of the log.
func (c *change) updateLog(config.Change) error {
	d := c.d
	d.level.Set(c.cfg.Log.SlogLevel())
	c.onUndo(func() error {
		d.level.Set(d.served.cfg.Log.SlogLevel())
		return nil
	})
	return nil
}

// updateSideServer moves a side server to its next address.
func (c *change) updateSideServer(ch config.Change) error {
	s := c.d.side[ch.Kind]
	c.onUndo(func() error { return s.listen(c.d.served.cfg) })
	return s.listen(c.cfg)
}
