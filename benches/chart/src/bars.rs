//! Bars side by side.

use std::fmt::Write;

use super::{BOLD, END, Picture, put, style};

/// One bar.
pub struct Bar {
    /// Its name.
    pub name: String,
    /// Its length, in the unit of all.
    pub value: f64,
    /// The text at its end.
    pub text: String,
    /// Its number, which has a colour.
    pub index: usize,
}

/// Bars one below the other.
pub struct Bars {
    /// Their title, with the unit.
    pub title: String,
    /// Whether the scale is logarithmic. The shortest bar has some length even then.
    pub logarithmic: bool,
    /// The bars, from top to bottom.
    pub bars: Vec<Bar>,
}

/// From bar to bar, and the height of each.
const STEP: f64 = 20.0;
const HEIGHT: f64 = 15.0;
const TITLE: f64 = 32.0;
/// The widths of the names at the left and of the texts at the right.
const NAMES: f64 = 136.0;
const TEXTS: f64 = 72.0;

impl Bars {
    /// How high they are, with their title.
    pub fn height(&self) -> f64 {
        TITLE + STEP * self.bars.len() as f64
    }

    /// Draws them with their left upper corner at `left` and `top`, `width` wide.
    pub fn draw(&self, picture: &mut Picture, left: f64, top: f64, width: f64) {
        picture.text(left, top + 20.0, BOLD, &self.title);
        let length = |value: f64| match self.logarithmic {
            true => value.max(0.1).ln(),
            false => value,
        };
        let lengths = || self.bars.iter().map(|bar| length(bar.value));
        let low = match self.logarithmic {
            true => lengths().fold(f64::INFINITY, f64::min) - 0.7,
            false => 0.0,
        };
        let high = lengths().fold(f64::NEG_INFINITY, f64::max).max(low + 1e-9);
        let start = left + NAMES;
        for (row, bar) in self.bars.iter().enumerate() {
            let y = top + TITLE + row as f64 * STEP;
            let part = (length(bar.value) - low) / (high - low);
            let width = (part * (width - NAMES - TEXTS)).max(1.0);
            picture.text(start - 8.0, y + 12.0, END, &bar.name);
            let (colour, _) = style(bar.index);
            put!(
                picture,
                r#"<rect x="{start:.1}" y="{y:.1}" width="{width:.1}" height="{HEIGHT}" fill="{colour}"/>"#
            );
            picture.text(start + width + 6.0, y + 12.0, "", &bar.text);
        }
    }
}
