//! Lines over two axes.

use std::fmt::Write;

use super::{Axis, BOLD, END, MIDDLE, Picture, SOFT, put, style};

/// The rectangle that lines are drawn in. Around it a chart needs 40 above for its title, 96 to the left and 48 below
/// for labels, and 230 to the right for the key.
#[derive(Clone, Copy)]
pub struct Area {
    /// Its left edge.
    pub left: f64,
    /// Its top edge.
    pub top: f64,
    /// Its width.
    pub width: f64,
    /// Its height.
    pub height: f64,
}

/// How a line goes from point to point.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Straight, with a mark at each point: for points that were measured.
    Straight,
    /// Up or down first, then to the right: a point's value held since the point before it.
    Steps,
}

/// One line.
pub struct Line {
    /// Its name in the key.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
}

/// Lines over axes.
pub struct Chart {
    /// Its title.
    pub title: String,
    /// The axis from left to right.
    pub across: Axis,
    /// The axis from bottom to top.
    pub up: Axis,
    /// How the lines go.
    pub shape: Shape,
    /// A line in steps with everything below it filled, behind the others.
    pub filled: Option<Line>,
    /// The lines with their numbers: a number has a colour and a dash, the same as a bar of that number.
    pub lines: Vec<(usize, Line)>,
}

impl Chart {
    /// A chart of measured points, whose axes hold them all; each axis is a label and whether it is logarithmic.
    pub fn measured(
        title: String,
        across: (&str, bool),
        up: (&str, bool),
        lines: Vec<Line>,
    ) -> Self {
        let points = || lines.iter().flat_map(|line| &line.points);
        Self {
            title,
            across: Axis::of(across.0, points().map(|point| point.0), across.1),
            up: Axis::of(up.0, points().map(|point| point.1), up.1).rounded(),
            shape: Shape::Straight,
            filled: None,
            lines: lines.into_iter().enumerate().collect(),
        }
    }

    /// Draws it around `area`.
    pub fn draw(&self, picture: &mut Picture, area: Area) {
        self.draw_axes(picture, area);
        let x = area.right() + 14.0;
        let mut key = area.top + 10.0;
        if let Some(filled) = &self.filled {
            let (left, bottom) = (area.left, area.bottom());
            let path = self.path(area, Shape::Steps, filled);
            picture.path(
                &format!("{path}V{bottom:.1}H{left:.1}z"),
                r##"fill="#d8d8d8""##,
            );
            picture.path(
                &format!("M{x:.1} {key:.1}h28"),
                r##"stroke="#d8d8d8" stroke-width="10""##,
            );
            picture.text(x + 36.0, key + 4.0, "", &filled.name);
            key += 20.0;
        }
        for (index, line) in &self.lines {
            let (colour, dash) = style(*index);
            let stroke = format!(
                r#"fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}""#
            );
            picture.path(&self.path(area, self.shape, line), &stroke);
            picture.path(&format!("M{x:.1} {key:.1}h28"), &stroke);
            picture.text(x + 36.0, key + 4.0, "", &line.name);
            key += 20.0;
            if self.shape == Shape::Straight {
                for point in &line.points {
                    let (x, y) = self.place(area, *point);
                    put!(
                        picture,
                        r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#
                    );
                }
            }
        }
    }

    fn place(&self, area: Area, (across, up): (f64, f64)) -> (f64, f64) {
        let x = area.left + self.across.place(across) * area.width;
        let y = area.bottom() - self.up.place(up) * area.height;
        (x, y)
    }

    /// The way along a line. In steps it begins at the left edge, as low as the axis goes.
    fn path(&self, area: Area, shape: Shape, line: &Line) -> String {
        let points = line.points.iter().map(|&point| self.place(area, point));
        match shape {
            Shape::Straight => points
                .enumerate()
                .map(|(at, (x, y))| format!("{}{x:.1} {y:.1}", if at == 0 { "M" } else { "L" }))
                .collect(),
            Shape::Steps => {
                let steps: String = points.map(|(x, y)| format!("V{y:.1}H{x:.1}")).collect();
                format!("M{:.1} {:.1}{steps}", area.left, area.bottom())
            }
        }
    }

    fn draw_axes(&self, picture: &mut Picture, area: Area) {
        let (left, right, bottom) = (area.left, area.right(), area.bottom());
        picture.text(left, area.top - 24.0, BOLD, &self.title);
        picture.text(left, area.top - 8.0, SOFT, &self.up.label);
        for (value, name) in &self.up.ticks {
            let (_, y) = self.place(area, (self.across.low, *value));
            picture.path(
                &format!("M{left:.1} {y:.1}H{right:.1}"),
                r##"stroke="#ddd""##,
            );
            picture.text(left - 8.0, y + 4.0, END, name);
        }
        for (value, name) in &self.across.ticks {
            let (x, _) = self.place(area, (*value, self.up.low));
            picture.path(&format!("M{x:.1} {bottom:.1}v5"), r##"stroke="#222""##);
            picture.text(x, bottom + 19.0, MIDDLE, name);
        }
        let middle = left + area.width / 2.0;
        picture.text(
            middle,
            bottom + 38.0,
            &format!("{MIDDLE} {SOFT}"),
            &self.across.label,
        );
    }
}

impl Area {
    fn right(self) -> f64 {
        self.left + self.width
    }

    fn bottom(self) -> f64 {
        self.top + self.height
    }
}
