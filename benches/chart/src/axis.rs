//! Axes: from values to places.

/// An axis of a chart: its range, its scale and its labels.
pub struct Axis {
    /// The quantity that it shows, with the unit.
    pub label: String,
    /// The value at the left or the bottom.
    pub low: f64,
    /// The value at the right or the top, above `low`.
    pub high: f64,
    /// Whether equal steps are equal ratios; both ends are above 0 then.
    pub logarithmic: bool,
    /// The values that are named, and their names.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// An axis from the least of `values`, or 0, to the greatest, with each of them named.
    pub fn of(label: &str, values: impl Iterator<Item = f64>, logarithmic: bool) -> Self {
        let mut values: Vec<f64> = values
            .filter(|&value| !logarithmic || value > 0.0)
            .collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let (mut low, mut high) = match (values.first(), values.last()) {
            (Some(&low), Some(&high)) => (low, high),
            _ => (1.0, 1.0),
        };
        if !logarithmic {
            low = low.min(0.0);
        }
        if high <= low {
            high = if logarithmic { low * 10.0 } else { low + 1.0 };
        }
        Self {
            label: label.to_owned(),
            low,
            high,
            logarithmic,
            ticks: values.into_iter().map(named).collect(),
        }
    }

    /// The same with some room above, and round numbers named: whole decades where it is logarithmic, else five
    /// steps.
    pub fn rounded(mut self) -> Self {
        if self.logarithmic {
            let decades = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
            (self.low, self.high) = (10_f64.powi(*decades.start()), 10_f64.powi(*decades.end()));
            self.ticks = decades.map(|power| named(10_f64.powi(power))).collect();
        } else {
            self.high += (self.high - self.low) * 0.08;
            let step = (self.high - self.low) / 5.0;
            self.ticks = (0..=5)
                .map(|count| named(self.low + step * f64::from(count)))
                .collect();
        }
        self
    }

    /// Where a value is: 0 at the low end, 1 at the high end, and at an end for a value beyond it.
    pub fn place(&self, value: f64) -> f64 {
        let [value, low, high] = [value, self.low, self.high].map(|value| match self.logarithmic {
            true => value.max(f64::MIN_POSITIVE).ln(),
            false => value,
        });
        ((value - low) / (high - low)).clamp(0.0, 1.0)
    }
}

/// A value with its name: short, with the unit's prefix where it is large.
fn named(value: f64) -> (f64, String) {
    let name = match value {
        _ if value >= 1e9 => format!("{} G", value / 1e9),
        _ if value >= 1e6 => format!("{} M", value / 1e6),
        _ if value >= 1e4 => format!("{} k", value / 1e3),
        _ if value == value.trunc() => format!("{value}"),
        _ if value >= 0.1 => format!("{value:.1}"),
        _ => format!("{value}"),
    };
    (value, name)
}
