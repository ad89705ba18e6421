"""What hardware is this, and how should code be compiled for it? Profiles are data, applied and reported by rule."""
