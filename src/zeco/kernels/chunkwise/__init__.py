"""Wide keys, of either kind of decay: states are written for every chunk."""
