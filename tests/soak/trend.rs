//! Whether numbers grow with time.

/// A line through points by least squares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trend {
    /// The gain in an hour.
    pub per_hour: f64,
    /// Its standard error.
    pub error: f64,
}

impl Trend {
    /// The trend of points of seconds and values; `None` for fewer than three.
    pub fn of(points: &[(f64, f64)]) -> Option<Self> {
        let count = points.len() as f64;
        if points.len() < 3 {
            return None;
        }
        let mean = |which: fn(&(f64, f64)) -> f64| points.iter().map(which).sum::<f64>() / count;
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        let square: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
        let product: f64 = points
            .iter()
            .map(|point| (point.0 - x) * (point.1 - y))
            .sum();
        let slope = product / square;
        let rest: f64 = points
            .iter()
            .map(|point| (point.1 - y - slope * (point.0 - x)).powi(2))
            .sum();
        let error = (rest / (count - 2.0) / square).sqrt();
        Some(Self {
            per_hour: slope * 3600.0,
            error: error * 3600.0,
        })
    }
}

#[test]
fn a_line_is_found_and_noise_is_an_error() {
    let line: Vec<_> = (0..10)
        .map(|at| (f64::from(at) * 60.0, 5.0 + f64::from(at)))
        .collect();
    let trend = Trend::of(&line).expect("enough points");
    assert!(
        (trend.per_hour - 60.0).abs() < 1e-6 && trend.error < 1e-3,
        "{trend:?}"
    );
    let noise = [(0.0, 1.0), (60.0, -1.0), (120.0, -1.0), (180.0, 1.0)];
    let trend = Trend::of(&noise).expect("enough points");
    assert!(
        trend.per_hour.abs() < 1e-6 && trend.error > 1.0,
        "{trend:?}"
    );
    assert_eq!(Trend::of(&line[..2]), None);
}
