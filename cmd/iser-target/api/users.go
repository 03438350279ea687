package api

import (
	"net/http"
	"slices"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/security"
)

// users returns the CHAP users of a target.
func (s *Server) users(r *http.Request) (any, error) {
	targets := s.d.Effective().Targets
	i := slices.IndexFunc(targets, func(t config.Target) bool { return t.Name == name(r) })
	if i < 0 {
		return nil, notFound("target %s", name(r))
	}
	target, list := &targets[i], []schema.UserState{}
	sessions := s.d.State().Sessions
	for _, u := range target.Auth.Users {
		st := schema.UserState{Name: u.Name, Initiator: u.Initiator, SecretFile: u.SecretFile, Previous: u.Previous != ""}
		for _, one := range sessions {
			if one.Target == target.Name && one.User == u.Name {
				st.Sessions++
				if one.OutdatedSecret {
					st.Outdated++
				}
			}
		}
		list = append(list, st)
	}
	return list, nil
}

// userConfig converts the body of a request to the configuration of a user. Errors do not contain the secret.
func userConfig(u *schema.User) (config.User, error) {
	c := config.User{Name: u.Name, SecretFile: u.SecretFile, Initiator: u.Initiator}
	switch {
	case u.Name == "":
		return c, invalid("name is required")
	case (u.Secret == "") == (u.SecretFile == ""):
		return c, invalid("one of secret and secret_file is required")
	case u.Secret == "":
		return c, nil
	}
	var err error
	if c.Secret, err = security.ParseSecret(u.Secret); err != nil {
		return c, invalid("secret: %v", err)
	}
	return c, nil
}

func (s *Server) addUser(r *http.Request) (any, error) {
	return add(s, r, func(d *config.Document, u *schema.User) error {
		c, err := userConfig(u)
		if err != nil {
			return err
		}
		return d.AddUser(name(r), c)
	})
}

func (s *Server) removeUser(r *http.Request) (any, error) {
	user, err := userName(r)
	if err != nil {
		return nil, err
	}
	return s.change(r, func(d *config.Document) error { return d.RemoveUser(name(r), user) })
}

func (s *Server) rotateUser(r *http.Request) (any, error) {
	return add(s, r, func(d *config.Document, u *schema.User) error {
		c, err := userConfig(u)
		if err != nil {
			return err
		}
		if u.Initiator != "" {
			return invalid("initiator: set it with PATCH of the target")
		}
		return d.RotateUser(name(r), c)
	})
}

func (s *Server) endRotation(r *http.Request) (any, error) {
	user, err := userName(r)
	if err != nil {
		return nil, err
	}
	return s.change(r, func(d *config.Document) error { return d.EndRotation(name(r), user) })
}

// userName returns the parameter user.
func userName(r *http.Request) (string, error) {
	user := r.URL.Query().Get("user")
	if user == "" {
		return "", invalid("query: user is required")
	}
	return user, nil
}
