"""What the commands do beyond calling one function of the package."""
