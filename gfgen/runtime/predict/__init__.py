"""How long tasks take: profiles, the cost model, and what follows from them."""
