"""Other people's models; the only room that knows them."""
