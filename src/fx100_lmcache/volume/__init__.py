"""What lies on the members as a whole: opening, formatting, claims, recovery."""
