"""Models of the engines around the package, and an explorer of every order of events; a broken promise is a `ModelViolation`."""
