//! Curves as SVG, with two logarithmic axes.

use std::fmt::Write;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 52.0;
/// Colours that most people can tell apart, on white and on black.
const COLOURS: [&str; 6] = ["#3b82c4", "#d9822b", "#2f9e6e", "#b8559b", "#8a7d2e", "#7a6fd0"];

/// One curve.
#[derive(Clone, Debug)]
pub struct Series {
    /// What it shows.
    pub name: String,
    /// Points with positive coordinates, ascending.
    pub points: Vec<(f64, f64)>,
}

/// Curves over one axis.
#[derive(Clone, Debug)]
pub struct Chart {
    /// What it is about.
    pub title: String,
    /// What the horizontal axis counts.
    pub across: String,
    /// What the vertical axis counts.
    pub up: String,
    /// The curves.
    pub series: Vec<Series>,
}

/// A logarithmic axis in whole decades.
struct Axis {
    low: i32,
    high: i32,
    from: f64,
    to: f64,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (mut low, mut high) = (f64::MAX, f64::MIN);
        for value in values.filter(|value| *value > 0.0) {
            low = low.min(value.log10());
            high = high.max(value.log10());
        }
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        // Decades of countable things: far within range.
        let (low, high) = ((low + 1e-9).floor() as i32, (high - 1e-9).ceil() as i32);
        Self { low, high: high.max(low + 1), from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let part = (value.log10() - f64::from(self.low)) / f64::from(self.high - self.low);
        self.from + part * (self.to - self.from)
    }

    fn decades(&self) -> impl Iterator<Item = f64> {
        (self.low..=self.high).map(|power| 10_f64.powi(power))
    }
}

impl Chart {
    /// The picture. It has no background, and its colours are legible on light and dark ones.
    ///
    /// ```
    /// use mesh_sim::{Chart, Series};
    /// let curve = Series { name: "a < b".into(), points: vec![(10.0, 0.5), (100.0, 2.0)] };
    /// let chart = Chart { title: "Times".into(), across: "hosts".into(), up: "ms".into(), series: vec![curve] };
    /// let svg = chart.svg();
    /// assert!(svg.starts_with("<svg") && svg.contains("a &lt; b"));
    /// ```
    #[must_use]
    pub fn svg(&self) -> String {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x = Axis::new(points().map(|point| point.0), LEFT, WIDTH - RIGHT);
        let y = Axis::new(points().map(|point| point.1), HEIGHT - BOTTOM, TOP);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
             font-family=\"sans-serif\" font-size=\"13\">\n<title>{}</title>\n\
             <style>text{{fill:#57606a}}.grid{{stroke:#8c959f;stroke-opacity:.35}}\
             @media(prefers-color-scheme:dark){{text{{fill:#b1bac4}}}}</style>\n",
            escape(&self.title)
        );
        let mut draw = |line: std::fmt::Arguments| {
            // Writing to a String cannot fail.
            let _ = out.write_fmt(line);
            out.push('\n');
        };
        draw(format_args!("<text x=\"{LEFT}\" y=\"24\" font-size=\"16\">{}</text>", escape(&self.title)));
        for value in x.decades() {
            let at = x.at(value);
            let bottom = HEIGHT - BOTTOM;
            draw(format_args!("<line class=\"grid\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\"/>"));
            let label = number(value);
            draw(format_args!("<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", bottom + 20.0));
        }
        for value in y.decades() {
            let at = y.at(value);
            let right = WIDTH - RIGHT;
            draw(format_args!("<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\"/>"));
            let label = number(value);
            draw(format_args!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", LEFT - 8.0, at + 4.0));
        }
        let middle = f64::midpoint(LEFT, WIDTH - RIGHT);
        draw(format_args!(
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 12.0,
            escape(&self.across)
        ));
        let half = f64::midpoint(TOP, HEIGHT - BOTTOM);
        draw(format_args!(
            "<text x=\"18\" y=\"{half}\" text-anchor=\"middle\" transform=\"rotate(-90 18 {half})\">{}</text>",
            escape(&self.up)
        ));
        let labels = self.label_places(&y);
        for ((series, colour), label) in self.series.iter().zip(COLOURS.iter().cycle()).zip(labels) {
            let points: Vec<(f64, f64)> = series
                .points
                .iter()
                .filter(|point| point.1 > 0.0)
                .map(|point| (x.at(point.0), y.at(point.1)))
                .collect();
            let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let path = path.join(" ");
            draw(format_args!("<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{path}\"/>"));
            for (x, y) in &points {
                draw(format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"));
            }
            let (dot, text) = (WIDTH - RIGHT + 14.0, WIDTH - RIGHT + 24.0);
            draw(format_args!("<circle cx=\"{dot}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"/>", label - 4.0));
            draw(format_args!("<text x=\"{text}\" y=\"{label:.1}\">{}</text>", escape(&series.name)));
        }
        out.push_str("</svg>\n");
        out
    }

    /// Where the names go: beside the ends of their curves, moved apart if they would overlap.
    fn label_places(&self, y: &Axis) -> Vec<f64> {
        let ends = self.series.iter().map(|series| series.points.last().map_or(TOP, |point| y.at(point.1.max(1e-12))));
        let mut order: Vec<(usize, f64)> = ends.enumerate().collect();
        order.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut places = vec![0.0; order.len()];
        let mut above = TOP - 20.0;
        for (index, end) in order {
            above = (end + 4.0).max(above + 18.0);
            places[index] = above;
        }
        places
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// 0.1, 10, 1,000.
fn number(value: f64) -> String {
    if value < 1.0 {
        return format!("{value}");
    }
    let digits = format!("{value:.0}");
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
