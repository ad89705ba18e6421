"""The Kubernetes backend: watch, queue, Lease, Jobs. The only place that knows the client library."""
