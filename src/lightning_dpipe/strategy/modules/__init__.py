"""DiffusionModules of the shipped recipes: what a user's own module looks like."""
