//go:build tools

// Package tools names the command that this module pins and builds.
package tools

import _ "go.etcd.io/etcd/server/v3"
