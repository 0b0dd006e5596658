//! Figures as SVG. Each system is a line, or a dot if nothing was swept. Values reported by others
//! have the same colour. A figure is a document of its own, legible in light and dark, or an
//! element of a page, which supplies the colours.

use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
use thiserror::Error;

/// The figure could not be drawn.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("the figure cannot be drawn: {0}")]
pub struct PlotError(String);

/// How a reported value relates to its point.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mark {
    /// It is this value.
    Value,
    /// It is more than this.
    Above,
    /// It is less than this.
    Below,
    /// It was reported as a ratio to, or a difference from, another measured value.
    Derived,
}

impl Mark {
    const ALL: [Self; 4] = [Self::Value, Self::Above, Self::Below, Self::Derived];

    fn meaning(self) -> &'static str {
        match self {
            Self::Value => "reported",
            Self::Above => "reported: above",
            Self::Below => "reported: below",
            Self::Derived => "reported as ratio",
        }
    }

    /// Its shape, in pixels around the point.
    fn strokes(self) -> &'static [&'static [(i32, i32)]] {
        match self {
            Self::Value => &[&[(-6, -6), (6, 6)], &[(-6, 6), (6, -6)]],
            Self::Above => &[&[(-7, 0), (7, 0), (0, -10), (-7, 0)]],
            Self::Below => &[&[(-7, 0), (7, 0), (0, 10), (-7, 0)]],
            Self::Derived => &[&[(-6, 0), (0, -6), (6, 0), (0, 6), (-6, 0)]],
        }
    }
}

/// One system in a figure.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// The measured values, each with the swept parameter.
    pub measured: Vec<(f64, f64)>,
    /// The reported values.
    pub reported: Vec<(Mark, (f64, f64))>,
}

/// The content of a figure.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Figure {
    /// The title.
    pub title: String,
    /// The note below the title: the source of the figure, and how it was measured.
    pub note: String,
    /// The swept parameter, with its unit.
    pub x: String,
    /// The measured quantity, with its unit.
    pub y: String,
    /// The systems, in the order of their colours.
    pub series: Vec<Series>,
}

/// Where a figure is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Alone,
    OnPage,
}

impl Place {
    /// A placeholder for a colour; the final SVG has the colour of its surroundings instead.
    fn color(series: usize) -> RGBAColor {
        RGBColor(1, 2, series as u8).to_rgba()
    }

    /// The colour of a system.
    fn paint(self, series: usize) -> String {
        match self {
            Self::Alone => format!("var(--c{})", series % COLORS.len()),
            Self::OnPage => format!("var(--s{series})"),
        }
    }
}

/// Colours of systems in a figure that stands alone, on white and on black.
const COLORS: [(&str, &str); 12] = [
    ("#1b6ca8", "#6cb6f0"),
    ("#c2410c", "#ff9d5c"),
    ("#15803d", "#66d48a"),
    ("#9d174d", "#f78fb8"),
    ("#6d28d9", "#b79bff"),
    ("#8a6d00", "#e3c64c"),
    ("#0e7490", "#5fd6ea"),
    ("#b91c1c", "#ff8f8f"),
    ("#4d7c0f", "#b3dd5e"),
    ("#a21caf", "#ee8cf5"),
    ("#475569", "#b4c2d3"),
    ("#7c2d12", "#d9a184"),
];

/// The colours of a figure that stands alone.
fn style() -> String {
    let colors = |is_dark: bool| {
        let pick = |(light, dark): &(&str, &str)| (if is_dark { *dark } else { *light }).to_owned();
        let named = COLORS.iter().map(pick).enumerate();
        named.map(|(at, color)| format!("--c{at}:{color};")).collect::<String>()
    };
    format!(
        "<style>svg.figure{{color:#1d2327;background:#fff;{}}}\
         @media (prefers-color-scheme: dark){{svg.figure{{color:#e2e6e9;background:#14181b;{}}}}}\
         svg.figure text{{fill:currentColor}}</style>",
        colors(false),
        colors(true)
    )
}

/// The size of a figure that stands alone.
const SIZE: (u32, u32) = (900, 480);
/// The width of the legend.
const LEGEND: u32 = 180;
/// Letters in a line of the title, and in a line of the note.
const LETTERS: (usize, usize) = (96, 130);
/// The vertical axis is logarithmic if the ratio of the largest to the smallest value is at least
/// this.
const LOG_FROM: f64 = 12.0;

impl Figure {
    /// The figure as an SVG document.
    ///
    /// # Errors
    /// Nothing was measured, or the figures are not numbers.
    pub fn svg(&self) -> Result<String, PlotError> {
        let svg = self.drawn(Place::Alone, SIZE)?;
        let svg = svg.replacen("<svg ", "<svg class=\"figure\" ", 1);
        let end = svg.find('>').map_or(0, |at| at + 1);
        let (head, rest) = svg.split_at(end);
        Ok(format!("{head}\n{}{rest}", style()))
    }

    /// The figure as an element of a page, of this width and height, without title and legend. Text
    /// and axes have the colour of the surrounding text. The parts of the `n`th of at most 256
    /// systems have the class `sn` and the colour `--sn`.
    ///
    /// # Errors
    /// As [`Figure::svg`].
    pub fn element(&self, size: (u32, u32)) -> Result<String, PlotError> {
        self.drawn(Place::OnPage, size)
    }

    fn drawn(&self, place: Place, size: (u32, u32)) -> Result<String, PlotError> {
        let points = || {
            let of = |one: &Series| {
                let reported = one.reported.iter().map(|(_, at)| *at);
                one.measured.iter().copied().chain(reported).collect::<Vec<_>>()
            };
            self.series.iter().flat_map(of)
        };
        let values = |pick: fn((f64, f64)) -> f64| {
            let finite = points().map(pick).filter(|value| value.is_finite());
            finite.fold(None, |range: Option<(f64, f64)>, value| {
                let (low, high) = range.unwrap_or((value, value));
                Some((low.min(value), high.max(value)))
            })
        };
        let (Some(x), Some(y)) = (values(|point| point.0), values(|point| point.1)) else {
            return Err(PlotError("nothing was measured".into()));
        };
        let mut svg = String::new();
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        let inside = match place {
            Place::Alone => self.surround(&area)?,
            Place::OnPage => area.clone(),
        };
        if y.0 > 0.0 && y.1 / y.0 > LOG_FROM {
            let range = (y.0 / 1.2..y.1 * 1.2).log_scale();
            self.draw(&inside, x, range)?;
        } else {
            self.draw(&inside, x, 0.0..(y.1 * 1.1).max(f64::MIN_POSITIVE))?;
        }
        area.present().map_err(failed)?;
        drop((inside, area));
        for kind in ["fill", "stroke"] {
            svg = svg.replace(&format!("{kind}=\"#000000\""), &format!("{kind}=\"currentColor\""));
            for which in 0..self.series.len() {
                let drawn = format!("{kind}=\"#0102{which:02X}\"");
                let color = place.paint(which);
                svg = svg.replace(&drawn, &format!("class=\"s{which}\" style=\"{kind}:{color}\""));
            }
        }
        Ok(svg)
    }

    /// Draws title, note and legend, and returns the remaining area.
    fn surround<'a>(&self, area: &Area<'a>) -> Result<Area<'a>, PlotError> {
        let black = BLACK.to_rgba();
        let write = |text: &str, at: (i32, i32), size: u32| {
            area.draw(&Text::new(text.to_owned(), at, ("sans-serif", size))).map_err(failed)
        };
        let mut top = 10;
        for line in wrapped(&self.title, LETTERS.0) {
            write(&line, (14, top), 17)?;
            top += 22;
        }
        for line in wrapped(&self.note, LETTERS.1) {
            write(&line, (14, top), 13)?;
            top += 18;
        }
        let (width, _) = area.dim_in_pixel();
        let left = width.saturating_sub(LEGEND) as i32;
        let mut at = top + 20;
        if self.is_swept() {
            for (which, one) in self.series.iter().enumerate() {
                let style = Place::color(which).stroke_width(2);
                let line = PathElement::new([(left, at + 6), (left + 22, at + 6)], style);
                area.draw(&line).map_err(failed)?;
                let dot = Circle::new((left + 11, at + 6), 4, Place::color(which).filled());
                area.draw(&dot).map_err(failed)?;
                write(&one.name, (left + 30, at), 13)?;
                at += 20;
            }
            at += 10;
        }
        for mark in Mark::ALL {
            if self.series.iter().flat_map(|one| &one.reported).any(|(used, _)| *used == mark) {
                for stroke in mark.strokes() {
                    let points = stroke.iter().map(|(x, y)| (left + 11 + x, at + 6 + y));
                    let line = PathElement::new(points.collect::<Vec<_>>(), black.stroke_width(2));
                    area.draw(&line).map_err(failed)?;
                }
                write(mark.meaning(), (left + 30, at), 13)?;
                at += 22;
            }
        }
        let (_, below) = area.split_vertically(top);
        let (chart, _) = below.split_horizontally(left - 8);
        Ok(chart)
    }

    /// True if the swept parameter has more than one value.
    fn is_swept(&self) -> bool {
        let mut at = self.series.iter().flat_map(|one| &one.measured).map(|(x, _)| *x);
        at.next().is_some_and(|first| at.any(|x| x != first))
    }

    fn draw<Y>(&self, area: &Area<'_>, x: (f64, f64), y: Y) -> Result<(), PlotError>
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let is_swept = self.is_swept();
        let count = self.series.len() as f64;
        let range = if is_swept { x.0..x.1 } else { -0.5..count - 0.5 };
        let mut builder = ChartBuilder::on(area);
        builder.margin(12);
        builder.x_label_area_size(44).y_label_area_size(64);
        builder.margin_right(24);
        let mut chart = builder.build_cartesian_2d(range, y).map_err(failed)?;
        let number = |value: &f64| format!("{}", (value * 1e6).round() / 1e6);
        let name = |at: &f64| {
            let which = at.round();
            let near = (at - which).abs() < 1e-6 && which >= 0.0;
            let one = near.then(|| self.series.get(which as usize)).flatten();
            one.map(|one| one.name.clone()).unwrap_or_default()
        };
        let mut mesh = chart.configure_mesh();
        mesh.light_line_style(WHITE.mix(0.0)).bold_line_style(BLACK.mix(0.12));
        mesh.label_style(("sans-serif", 13)).y_desc(&self.y).y_label_formatter(&number);
        if is_swept {
            mesh.x_desc(&self.x).x_label_formatter(&number);
        } else {
            let at = self.series.first().and_then(|one| one.measured.first());
            let at = at.map_or_else(String::new, |(x, _)| format!("{} = {}", self.x, number(x)));
            mesh.disable_x_mesh().x_labels(self.series.len().max(2)).x_desc(at);
            mesh.x_label_formatter(&name);
        }
        mesh.draw().map_err(failed)?;
        for (which, one) in self.series.iter().enumerate() {
            let color = Place::color(which);
            let at = |&(x, y): &(f64, f64)| (if is_swept { x } else { which as f64 }, y);
            let measured: Vec<(f64, f64)> = one.measured.iter().map(at).collect();
            let dots = measured.iter().map(|&at| Circle::new(at, 4, color.filled()));
            chart.draw_series(dots).map_err(failed)?;
            for (mark, point) in &one.reported {
                for stroke in mark.strokes() {
                    let line = PathElement::new(stroke.to_vec(), color.stroke_width(2));
                    let placed = EmptyElement::at(at(point)) + line;
                    chart.draw_series([placed]).map_err(failed)?;
                }
            }
            if is_swept {
                let line = LineSeries::new(measured, color.stroke_width(2));
                chart.draw_series(line).map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// Breaks a text into lines of at most `letters` letters. A longer word has a line of its own.
fn wrapped(text: &str, letters: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= letters => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn failed(error: impl std::fmt::Display) -> PlotError {
    PlotError(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Points<'a> = &'a [(f64, f64)];

    fn figure(series: &[(&str, Points<'_>, Points<'_>)]) -> Figure {
        let series = series.iter().map(|(name, measured, reported)| Series {
            name: (*name).into(),
            measured: measured.to_vec(),
            reported: reported.iter().map(|&at| (Mark::Value, at)).collect(),
        });
        let text = |text: &str| text.to_owned();
        Figure {
            title: text("a <title>"),
            note: text("short form"),
            x: text("rate"),
            y: text("ms"),
            series: series.collect(),
        }
    }

    #[test]
    fn lines_have_a_legend_and_reported_values_their_crosses() {
        let svg = figure(&[
            ("one", &[(50.0, 300.0), (100.0, 9_000.0)], &[(50.0, 290.0)]),
            ("other", &[(50.0, 400.0), (100.0, 500.0)], &[]),
        ]);
        let svg = svg.svg().unwrap();
        for part in ["<svg", "a &lt;title&gt;", "short form", "one", "other", "rate", "<polyline"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        for part in ["<circle", "reported", "var(--c1)", "prefers-color-scheme: dark"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert!(!svg.contains("reported: above"), "it explains a mark that it has not");
        assert!(!svg.contains("#0102"), "a colour was not replaced");
    }

    #[test]
    fn an_element_takes_its_colours_from_the_page() {
        let points: Points<'_> = &[(50.0, 300.0), (100.0, 320.0)];
        let svg = figure(&[("one", points, &[(50.0, 290.0)]), ("other", points, &[])]);
        let svg = svg.element((400, 300)).unwrap();
        assert!(!svg.contains('#') && !svg.contains("a &lt;title&gt;"), "{svg}");
        for part in ["currentColor", "class=\"s0\"", "style=\"stroke:var(--s1)\"", "rate"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
    }

    #[test]
    fn an_experiment_without_a_sweep_has_one_column_for_each_system() {
        let svg = figure(&[("one", &[(200.0, 290.0)], &[]), ("other", &[(200.0, 235.0)], &[])]);
        let svg = svg.svg().unwrap();
        assert!(svg.contains("rate = 200") && svg.contains("other"), "{svg}");
    }

    #[test]
    fn long_titles_have_several_lines() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("extraordinary", 7), ["extraordinary"]);
        assert!(wrapped(" ", 7).is_empty());
    }

    #[test]
    fn a_figure_without_measurements_is_an_error() {
        assert!(figure(&[]).svg().is_err());
        assert!(figure(&[("one", &[(1.0, f64::NAN)], &[])]).svg().is_err());
    }
}
