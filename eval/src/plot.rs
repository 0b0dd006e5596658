//! Figures as SVG: one line a system, or one bar each where nothing was swept, with the values that
//! somebody else reported drawn in as crosses of the same colour. As a document of its own, or as a part of
//! a page that gives it its colours.

use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
use thiserror::Error;

/// A figure that could not be drawn.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("the figure cannot be drawn: {0}")]
pub struct PlotError(String);

/// One system in a figure.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// What was measured, by what was swept.
    pub measured: Vec<(f64, f64)>,
    /// What was reported.
    pub reported: Vec<(f64, f64)>,
}

/// What a figure shows.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Figure {
    /// Above it.
    pub title: String,
    /// What was swept, with its unit.
    pub x: String,
    /// What was measured, with its unit.
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
    fn color(self, series: usize) -> RGBAColor {
        match self {
            Self::Alone => Palette99::pick(series).to_rgba(),
            // Stands for the page's own colour of the series, and is replaced by it.
            Self::OnPage => RGBColor(1, 2, series as u8).to_rgba(),
        }
    }
}

/// Of a figure that stands alone.
const SIZE: (u32, u32) = (860, 480);
/// From this ratio of the largest to the smallest value on, the vertical axis is logarithmic.
const LOG_FROM: f64 = 12.0;

impl Figure {
    /// The figure as an SVG document.
    ///
    /// # Errors
    /// Nothing was measured, or the figures are not numbers.
    pub fn svg(&self) -> Result<String, PlotError> {
        self.drawn(Place::Alone, SIZE)
    }

    /// The figure as an element of a page, of this width and height, without title and legend. Text and axes have the colour of the text
    /// around it; what belongs to the `n`th of at most 256 systems has the class `sn` and the colour `--sn`.
    ///
    /// # Errors
    /// As [`Figure::svg`].
    pub fn element(&self, size: (u32, u32)) -> Result<String, PlotError> {
        let mut svg = self.drawn(Place::OnPage, size)?;
        for kind in ["fill", "stroke"] {
            svg = svg.replace(&format!("{kind}=\"#000000\""), &format!("{kind}=\"currentColor\""));
            for which in 0..self.series.len() {
                let (drawn, color) =
                    (format!("{kind}=\"#0102{which:02X}\""), format!("var(--s{which})"));
                svg = svg.replace(&drawn, &format!("class=\"s{which}\" style=\"{kind}:{color}\""));
            }
        }
        Ok(svg)
    }

    fn drawn(&self, place: Place, size: (u32, u32)) -> Result<String, PlotError> {
        let points = || self.series.iter().flat_map(|one| one.measured.iter().chain(&one.reported));
        let values = |pick: fn(&(f64, f64)) -> f64| {
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
        let background = match place {
            Place::Alone => area.fill(&WHITE).map_err(failed),
            Place::OnPage => Ok(()),
        };
        let drawn = background.and_then(|()| {
            if y.0 > 0.0 && y.1 / y.0 > LOG_FROM {
                let range = (y.0 / 1.2..y.1 * 1.2).log_scale();
                self.draw(place, &area, x, range)
            } else {
                self.draw(place, &area, x, 0.0..(y.1 * 1.1).max(f64::MIN_POSITIVE))
            }
        });
        drawn.and_then(|()| area.present().map_err(failed))?;
        drop(area);
        Ok(svg)
    }

    fn draw<Y>(&self, place: Place, area: &Area<'_>, x: (f64, f64), y: Y) -> Result<(), PlotError>
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let is_swept = x.0 < x.1;
        let count = self.series.len() as f64;
        let range = if is_swept { x.0..x.1 } else { -0.5..count - 0.5 };
        let mut builder = ChartBuilder::on(area);
        builder.margin(12);
        if place == Place::Alone {
            builder.caption(&self.title, ("sans-serif", 18));
        }
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
            let color = place.color(which);
            let at = |&(x, y): &(f64, f64)| (if is_swept { x } else { which as f64 }, y);
            let measured: Vec<(f64, f64)> = one.measured.iter().map(at).collect();
            let dots = measured.iter().map(|&at| Circle::new(at, 4, color.filled()));
            chart.draw_series(dots).map_err(failed)?;
            let crosses =
                one.reported.iter().map(at).map(|at| Cross::new(at, 6, color.stroke_width(2)));
            chart.draw_series(crosses).map_err(failed)?;
            if is_swept {
                let line = LineSeries::new(measured, color.stroke_width(2));
                let legend =
                    move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2));
                chart.draw_series(line).map_err(failed)?.label(&one.name).legend(legend);
            }
        }
        if is_swept && place == Place::Alone {
            let mut legend = chart.configure_series_labels();
            legend.position(SeriesLabelPosition::UpperLeft).label_font(("sans-serif", 13));
            legend.background_style(WHITE.mix(0.8)).border_style(BLACK.mix(0.3));
            legend.draw().map_err(failed)?;
        }
        Ok(())
    }
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
            reported: reported.to_vec(),
        });
        let text = |text: &str| text.to_owned();
        Figure {
            title: text("a <title>"),
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
        for part in ["<svg", "a &lt;title&gt;", "one", "other", "rate", "<polyline", "<circle"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
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
    fn what_was_not_swept_is_one_column_each() {
        let svg = figure(&[("one", &[(200.0, 290.0)], &[]), ("other", &[(200.0, 235.0)], &[])]);
        let svg = svg.svg().unwrap();
        assert!(svg.contains("rate = 200") && svg.contains("other"), "{svg}");
    }

    #[test]
    fn nothing_is_not_a_figure() {
        assert!(figure(&[]).svg().is_err());
        assert!(figure(&[("one", &[(1.0, f64::NAN)], &[])]).svg().is_err());
    }
}
