"""What the router and its worker processes say to each other, and how the bytes travel."""
