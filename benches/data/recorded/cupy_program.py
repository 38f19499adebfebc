"""A CuPy program: queries over tables of columns, as of a data frame library."""

import numpy

# Tables hold so much at most; the oldest goes.
HELD = 2 << 30
BASE_ROWS = 1 << 23
GROUPS = 5000
COLUMNS = ("key", "group", "value", "price")


def record(name, log, limits, device, seed):
    """Run the program until `limits`, and fill `log`."""
    if device != "cuda":
        Program(numpy, seed, 1 << 16).run(lambda queries: limits.more(200 * queries))
        return
    import cupy

    class Hook(cupy.cuda.MemoryHook):
        """Logs the pool's allocations and frees."""

        name = "record"
        live = most = 0

        def malloc_postprocess(self, size, mem_size, mem_ptr, **_):
            # Nothing is allocated for no bytes, nor where it failed.
            if size and mem_ptr:
                log.add("allocate", mem_ptr, size)
                sizes[mem_ptr] = size
                self.live += size
                self.most = max(self.most, self.live)

        def free_preprocess(self, mem_ptr, **_):
            size = sizes.pop(mem_ptr, None)
            if size:
                log.add("free", mem_ptr, size)
                self.live -= size

    sizes = {}
    pool = cupy.get_default_memory_pool()
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    log.about["cupy"] = cupy.__version__
    log.about["cuda"] = cupy.cuda.runtime.runtimeGetVersion()
    log.about["gpu"] = properties["name"].decode()
    log.about["sizes"] = "as requested"
    with Hook() as hook:
        try:
            Program(cupy, seed, BASE_ROWS).run(lambda _: limits.more(len(log.lines)))
        finally:
            # The pool's own use of memory beside the bytes requested. It gives nothing back.
            log.about["requested at most"] = hook.most
            log.about["reserved at most"] = pool.total_bytes()


def bytes_of(table):
    """Return the bytes of a table's columns."""
    return sum(column.nbytes for column in table.values())


class Program:
    """Tables, and queries that make new ones of them."""

    def __init__(self, xp, seed, rows):
        self.xp = xp
        self.chance = numpy.random.default_rng(seed)
        self.rows = rows
        # The rows to load are slices of these.
        self.base = {
            "key": self.chance.integers(0, 1 << 24, rows),
            "group": self.chance.integers(0, GROUPS, rows, dtype=numpy.int32),
            "value": self.chance.standard_normal(rows),
            "price": self.chance.random(rows, dtype=numpy.float32),
        }
        self.tables = []
        self.queries = {
            self.filter: 4,
            self.sort: 3,
            self.join: 3,
            self.group: 3,
            self.derive: 2,
            self.append: 1,
            self.spectrum: 2,
            self.summary: 1,
        }

    def run(self, more):
        """Query until `more`, which gets the number of queries, says no."""
        queries = list(self.queries)
        weights = numpy.array(list(self.queries.values())) / sum(self.queries.values())
        done = 0
        while more(done):
            if len(self.tables) < 4 or self.chance.random() < 0.25:
                self.keep(self.load())
            query = queries[self.chance.choice(len(queries), p=weights)]
            made = query(self.any())
            if made and len(made["key"]):
                self.keep(made)
            del made
            done += 1

    def keep(self, table):
        """Keep a table; the oldest ones go."""
        self.tables.append(table)
        while sum(map(bytes_of, self.tables)) > HELD and len(self.tables) > 2:
            del self.tables[0]
        while len(self.tables) > 24:
            del self.tables[self.chance.integers(len(self.tables) - 1)]

    def any(self):
        """Return one of the tables."""
        return self.tables[self.chance.integers(len(self.tables))]

    def load(self):
        """Return a new table of 1000 rows up to half of the base's."""
        rows = int(10 ** self.chance.uniform(3, numpy.log10(self.rows / 2)))
        first = self.chance.integers(self.rows - rows)
        return {name: self.xp.asarray(column[first : first + rows]) for name, column in self.base.items()}

    def filter(self, table):
        """Keep the rows whose value is in a range."""
        low, high = sorted(self.chance.normal(size=2))
        mask = (table["value"] > low) & (table["value"] < high + 0.1)
        return {name: column[mask] for name, column in table.items()}

    def sort(self, table):
        """Sort by one of the columns."""
        order = self.xp.argsort(table[COLUMNS[self.chance.integers(len(COLUMNS))]])
        return {name: column[order] for name, column in table.items()}

    def join(self, left):
        """Join with another table by the key: each pair of rows with the same one."""
        xp, right = self.xp, self.any()
        order = xp.argsort(right["key"])
        keys = right["key"][order]
        first = xp.searchsorted(keys, left["key"], side="left")
        count = xp.searchsorted(keys, left["key"], side="right") - first
        ends = xp.cumsum(count)
        pairs = int(ends[-1])
        # A table joined with itself over and over would grow without end.
        if pairs == 0 or pairs > self.rows:
            return None
        number = xp.arange(pairs)
        of_left = xp.searchsorted(ends, number, side="right")
        of_right = order[first[of_left] + number - (ends[of_left] - count[of_left])]
        del number, ends, count, first, keys, order
        return {
            "key": left["key"][of_left],
            "group": right["group"][of_right],
            "value": left["value"][of_left] + right["value"][of_right],
            "price": left["price"][of_left] * right["price"][of_right],
        }

    def group(self, table):
        """Sum and count by group; a group's key is its smallest one."""
        xp = self.xp
        order = xp.argsort(table["group"])
        groups = table["group"][order]
        starts = xp.flatnonzero(xp.concatenate([xp.ones(1, dtype=bool), groups[1:] != groups[:-1]]))
        sums = xp.cumsum(table["value"][order])
        ends = xp.concatenate([starts[1:], xp.asarray([len(groups)])]) - 1
        totals = sums[ends]
        totals[1:] -= sums[ends[:-1]]
        price = xp.bincount(table["group"], weights=table["price"], minlength=GROUPS)
        return {
            "key": table["key"][order][starts],
            "group": groups[starts],
            "value": totals / (ends - starts + 1),
            "price": price[groups[starts]].astype(numpy.float32),
        }

    def derive(self, table):
        """Replace a column by one computed from others."""
        xp = self.xp
        value, price = table["value"], table["price"]
        score = xp.where(value > 0, xp.log1p(xp.abs(value)) * price, -xp.sqrt(xp.abs(value)))
        return {**table, "value": (score - score.mean()) / (score.std() + 1e-9)}

    def append(self, table):
        """Put two tables one below the other."""
        other = self.any()
        if len(table["key"]) + len(other["key"]) > self.rows:
            return None
        return {name: self.xp.concatenate([table[name], other[name]]) for name in COLUMNS}

    def spectrum(self, table):
        """Smooth a column by a Fourier transform, over as many rows as a fast one takes."""
        xp = self.xp
        rows = len(table["value"])
        if rows < 16:
            return None
        unit = 1 << (rows.bit_length() - 4)
        rows = rows // unit * unit
        lines = xp.fft.rfft(table["value"][:rows])
        lines[len(lines) // 8 + 1 :] = 0
        smooth = xp.fft.irfft(lines, n=rows)
        del lines
        return {**{name: table[name][:rows].copy() for name in ("key", "group", "price")}, "value": smooth}

    def summary(self, table):
        """Make numbers for a report; no table comes of it."""
        xp = self.xp
        names, counts = xp.unique(table["group"], return_counts=True)
        levels = xp.percentile(table["value"], (5.0, 50.0, 95.0))
        histogram, _ = xp.histogram(table["price"], bins=64)
        float(levels.sum()) + int(counts.sum()) + int(histogram.sum()) + len(names)
        return None
