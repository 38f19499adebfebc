"""Draws docs/plots/python-*.svg from src/python/figures.csv: python3 src/python/plots.py, in the repository's root."""

import csv
import pathlib
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parents[2]
MACHINE = "NVIDIA H100 80GB HBM3, x86-64 (PCIe), driver 580.159.04, PyTorch 2.11, CuPy 14.2"
PICTURES = {
    "python-pairs": ("64 KiB, allocate and free", "µs"),
    "python-exact": ("Memory of a pinned tensor of 5 GiB", "GiB"),
    "python-offload": ("GPU memory allocated after a forward pass", "MiB"),
}
WIDTH, NAMES, BAR, GAP, HEAD = 760, 330, 20, 8, 64


def draw(title, unit, rows):
    """Returns a picture of bars as SVG. Those of egmem have the first colour."""
    height = HEAD + len(rows) * (BAR + GAP) + 12
    longest = max(value for _, value in rows)
    scale = (WIDTH - NAMES - 100) / longest
    words = "; ".join(f"{name}: {value:g} {unit}" for name, value in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11" fill="#222">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(words)}</desc>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="20" y="26" font-size="16" font-weight="bold">{escape(title)}, {unit}</text>',
        f'<text x="20" y="46" fill="#555">{escape(MACHINE)}; less is better</text>',
    ]
    for index, (name, value) in enumerate(rows):
        y = HEAD + index * (BAR + GAP)
        colour = "#0072b2" if "egmem" in name or name.startswith("the same") else "#d55e00"
        length = max(value * scale, 1)
        lines += [
            f'<text x="{NAMES - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{NAMES}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<text x="{NAMES + length + 6:.1f}" y="{y + 14}">{value:g}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main():
    rows = {picture: [] for picture in PICTURES}
    with open(ROOT / "src/python/figures.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows[row["picture"]].append((row["name"], float(row["value"])))
    for picture, (title, unit) in PICTURES.items():
        (ROOT / f"docs/plots/{picture}.svg").write_text(draw(title, unit, rows[picture]), encoding="utf-8")


if __name__ == "__main__":
    main()
