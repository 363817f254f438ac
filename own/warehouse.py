"""What a warehouse has: an example of a tool of your own (docs/own-agent.md)."""

STOCK = {  # item: price in euros, pieces
    "brass hinge": (4, 230),
    "oak plank": (17, 64),
    "copper pipe": (12, 118),
    "steel bolt": (2, 940),
    "paint roller": (6, 75),
    "ceiling lamp": (39, 22),
    "door handle": (14, 87),
    "garden hose": (26, 31),
    "floor tile": (5, 610),
    "window latch": (8, 143),
    "cable drum": (45, 12),
    "wall socket": (7, 205),
    "rubber mat": (19, 48),
    "tool box": (33, 27),
    "wood screw": (1, 1800),
    "roof gutter": (28, 36),
    "glass shelf": (23, 52),
    "chain lock": (16, 69),
    "wire brush": (9, 134),
    "hand saw": (21, 41),
    "lime bucket": (11, 93),
    "ladder": (58, 15),
    "sink trap": (13, 79),
    "heat lamp": (47, 18),
}


def look_up(item: str) -> str:
    """Look up the price of an item of the warehouse, and how many pieces are in stock.

    item: The name of one item, in the singular.
    """
    found = STOCK.get(item.strip().lower())
    return f"{found[0]} euros, {found[1]} in stock" if found else f"no item is called {item}"
