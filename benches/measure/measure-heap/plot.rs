//! Charts side by side, as an SVG.

use egmem_chart::{Area, Chart, Picture};

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 96.0;
const TOP: f64 = Picture::HEAD + 40.0;
/// The width of the key beside a chart.
const KEY: f64 = 230.0;

/// The picture: `about` names the machine that was measured.
pub fn draw(title: &str, about: &str, charts: &[Chart]) -> String {
    let each = LEFT + WIDTH + KEY;
    let mut picture = Picture::new(
        each * charts.len().max(1) as f64,
        TOP + HEIGHT + 56.0,
        title,
        &format!("{about}; medians"),
        "",
    );
    for (index, chart) in charts.iter().enumerate() {
        let area = Area {
            left: each * index as f64 + LEFT,
            top: TOP,
            width: WIDTH,
            height: HEIGHT,
        };
        chart.draw(&mut picture, area);
    }
    picture.finish()
}
