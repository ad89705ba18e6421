"""Is this model, script or machine ready for compiled distributed training? Findings, each with evidence and remedy."""
