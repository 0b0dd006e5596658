//! Draws one transaction of a trace as a sequence diagram, in Mermaid's language or as SVG.
//!
//! Messages are arrows in the order of their arrival, each with its times of sending and arrival,
//! in milliseconds since the transaction's first event. Requests and answers of the client are
//! notes. Events that the trace does not ascribe to the transaction are left out: timers, flushes,
//! and messages about several transactions at once, such as those of a replicated log.
//!
//! A trace may begin with comments that say where nodes are: `# node n6 VA gateway`.

use std::fmt::Write as _;

use orthodrome_core::cluster::{Cluster, Role};
use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::Time;
use orthodrome_core::trace::{Event, Line, ParseLineError};

/// The comments for the start of a trace that say where the nodes of `cluster` are.
#[must_use]
pub fn places(cluster: &Cluster) -> String {
    let mut text = String::new();
    for node in cluster.nodes() {
        let region = cluster.topology.name_of(node.region);
        let role = match node.role {
            Role::Server => "server",
            Role::Gateway => "gateway",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# node {} {region} {role}", node.id);
    }
    text
}

/// The node that a comment places, and its place: `VA gateway`.
pub(crate) fn place(comment: &str) -> Option<(NodeId, String)> {
    let mut words = comment.split_whitespace();
    words.next().filter(|word| *word == "node")?;
    let node = words.next()?.parse().ok()?;
    Some((node, words.collect::<Vec<_>>().join(" ")))
}

/// In pixels: from the edge to the first column, from the last column to the other edge, and from
/// one column to the next.
const MARGIN: f64 = 90.0;
const LAST: f64 = 260.0;
const COLUMN: f64 = 210.0;
/// In pixels: the position of time zero, the least height of a row, and the height of a
/// millisecond.
const HEAD: f64 = 44.0;
const ROW: f64 = 18.0;
const PER_MS: f64 = 2.0;

const STYLE: &str = "svg{--ink:#222;--paper:#fff;--faint:#bbb;font:11px system-ui,sans-serif}\
@media(prefers-color-scheme:dark){svg{--ink:#ddd;--paper:#181818;--faint:#555}}\
rect{fill:var(--paper)}line{stroke:var(--ink)}.life{stroke:var(--faint)}path,circle{fill:var(--ink)}\
text{fill:var(--ink);text-anchor:middle;paint-order:stroke;stroke:var(--paper);stroke-width:3px}\
.node{font-weight:bold}.note{text-anchor:start}";

/// Builds a diagram: reads a trace line by line and keeps the lines of one transaction.
#[derive(Clone, Debug)]
pub struct Diagram {
    txn: TxnId,
    all_attempts: bool,
    places: OrdMap<NodeId, String>,
    lines: Vec<Line>,
}

impl Diagram {
    /// A diagram of one attempt, or with `all_attempts` of every attempt at the same transaction.
    #[must_use]
    pub fn new(txn: TxnId, all_attempts: bool) -> Self {
        Self { txn, all_attempts, places: OrdMap::new(), lines: Vec::new() }
    }

    /// Reads one line of a trace, without its line break.
    ///
    /// # Errors
    /// If it is neither a comment nor a line of a trace.
    pub fn read_line(&mut self, text: &str) -> Result<(), ParseLineError> {
        if let Some(comment) = text.strip_prefix('#') {
            self.places.extend(place(comment));
            return Ok(());
        }
        let line: Line = text.parse()?;
        let is_wanted = line.txn.is_some_and(|txn| match self.all_attempts {
            true => txn.is_same_txn(self.txn),
            false => txn == self.txn,
        });
        if is_wanted {
            self.lines.push(line);
        }
        Ok(())
    }

    /// The diagram; none if no line was about the transaction.
    #[must_use]
    pub fn to_mermaid(&self) -> Option<String> {
        let start = self.lines.iter().map(|line| line.sent.unwrap_or(line.at)).min()?;
        let mut text = String::from("sequenceDiagram\n");
        let mut add = |row: String| {
            text.push_str("    ");
            text.push_str(&row);
            text.push('\n');
        };
        for node in self.participants() {
            let label = match self.places.get(&node) {
                Some(place) => format!("{node} {}", escape(place)),
                None => node.to_string(),
            };
            add(format!("participant {node} as {label}"));
        }
        for line in &self.lines {
            add(self.row(line, start));
        }
        Some(text)
    }

    /// The diagram as an SVG drawing; none if no line was about the transaction. Time runs
    /// downwards, and messages slant by the time that they travelled. Busy moments are stretched so
    /// that the labels do not overlap.
    #[must_use]
    pub fn to_svg(&self) -> Option<String> {
        let start = self.lines.iter().map(|line| line.sent.unwrap_or(line.at)).min()?;
        let nodes = self.participants();
        let x_of = |node: NodeId| {
            let column = nodes.iter().position(|other| *other == node).unwrap_or_default();
            MARGIN + column as f64 * COLUMN
        };
        let moments = self.moments(start);
        let width = MARGIN + LAST + nodes.len().saturating_sub(1) as f64 * COLUMN;
        let bottom = moments.last().map_or(HEAD, |(_, y)| *y) + ROW;
        let title = format!("{} in {} messages and notes", self.txn, self.lines.len());
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {:.0}\" width=\"{width:.0}\" \
             role=\"img\">\n<title>{}</title>\n<style>{STYLE}</style>\n<rect width=\"100%\" height=\"100%\"/>\n",
            bottom + ROW,
            escape_xml(&title)
        );
        let mut add = |row: String| {
            text.push_str(&row);
            text.push('\n');
        };
        for &node in &nodes {
            let (x, place) = (x_of(node), self.places.get(&node).map_or("", String::as_str));
            add(format!(
                "<line class=\"life\" x1=\"{x}\" y1=\"{HEAD}\" x2=\"{x}\" y2=\"{bottom:.1}\"/>"
            ));
            add(format!("<text class=\"node\" x=\"{x}\" y=\"18\">{node}</text>"));
            add(format!("<text class=\"place\" x=\"{x}\" y=\"34\">{}</text>", escape_xml(place)));
        }
        for (line, (_, y)) in self.lines.iter().zip(moments.iter().skip(1)) {
            let x = x_of(line.node);
            let label = escape_xml(&self.label(line, start));
            match (line.event, line.peer, line.sent) {
                (Event::Receive, Some(peer), Some(sent)) => {
                    let (from, left) = (x_of(peer), height(&moments, micros(sent, start)).min(*y));
                    let back = if from < x { -6.0 } else { 6.0 };
                    add(format!(
                        "<line x1=\"{from}\" y1=\"{left:.1}\" x2=\"{x}\" y2=\"{y:.1}\"/><path d=\"M{x} {y:.1}l{back} -4v8z\"/>"
                    ));
                    let (at, above) = (from + (x - from) * 0.62, left + (y - left) * 0.62 - 4.0);
                    add(format!("<text x=\"{at}\" y=\"{above:.1}\">{label}</text>"));
                }
                _ => {
                    add(format!("<circle cx=\"{x}\" cy=\"{y:.1}\" r=\"3\"/>"));
                    add(format!(
                        "<text class=\"note\" x=\"{}\" y=\"{:.1}\">{label}</text>",
                        x + 7.0,
                        y + 4.0
                    ));
                }
            }
        }
        text.push_str("</svg>\n");
        Some(text)
    }

    /// The height of each moment: each row is at least one step below the last.
    fn moments(&self, start: Time) -> Vec<(u64, f64)> {
        let mut moments: Vec<(u64, f64)> = vec![(0, HEAD)];
        for line in &self.lines {
            let (last, y) = moments.last().copied().unwrap_or_default();
            let at = micros(line.at, start);
            moments.push((at, y + ROW.max(at.saturating_sub(last) as f64 / 1e3 * PER_MS)));
        }
        moments
    }

    /// The label of a line of the drawing.
    fn label(&self, line: &Line, start: Time) -> String {
        let attempt = match line.txn {
            Some(txn) if self.all_attempts && txn.attempt > 0 => format!(" {txn}"),
            Some(_) | None => String::new(),
        };
        let Line { event, kind, detail, .. } = line;
        let what = match event {
            Event::Receive => kind.to_string(),
            Event::Begin => {
                format!("begin {}", line.txn.map(|txn| txn.to_string()).unwrap_or_default())
            }
            Event::Finish => detail.to_string(),
            Event::Resolve => "ask for the outcome".into(),
            Event::Lose => format!("{kind} is lost"),
            Event::Read | Event::Decide | Event::Reads => event.to_string(),
            Event::Timer | Event::Durable | Event::Note | Event::Fault => format!("{event} {kind}"),
        };
        let attempt = if *event == Event::Begin { "" } else { &attempt };
        format!("{what}{attempt}, {} ms", millis(line.at, start))
    }

    /// Nodes in the order of their first appearance, senders before receivers.
    fn participants(&self) -> Vec<NodeId> {
        let mut nodes = Vec::new();
        for line in &self.lines {
            let ends = match line.event {
                Event::Receive => [line.peer, Some(line.node)],
                Event::Begin
                | Event::Read
                | Event::Decide
                | Event::Resolve
                | Event::Lose
                | Event::Timer
                | Event::Durable
                | Event::Reads
                | Event::Finish
                | Event::Note
                | Event::Fault => [Some(line.node), line.peer],
            };
            for node in ends.into_iter().flatten() {
                if !nodes.contains(&node) {
                    nodes.push(node);
                }
            }
        }
        nodes
    }

    fn row(&self, line: &Line, start: Time) -> String {
        let Line { at, node, event, peer, sent, kind, .. } = line;
        let attempt = match line.txn {
            Some(txn) if self.all_attempts && txn.attempt > 0 => format!(" {}", name(txn)),
            Some(_) | None => String::new(),
        };
        let kind = escape(kind);
        let arrived = millis(*at, start);
        let note = |what: String| format!("Note over {node}: {what} at {arrived} ms");
        match (event, peer, sent) {
            (Event::Receive, Some(peer), Some(sent)) => {
                let left = millis(*sent, start);
                format!("{peer}->>{node}: {kind}{attempt}, {left} to {arrived} ms")
            }
            (Event::Lose, Some(peer), Some(sent)) => {
                let left = millis(*sent, start);
                format!("{node}-x{peer}: {kind}{attempt}, {left} ms, lost")
            }
            (Event::Begin, ..) => note(format!("begin {}", line.txn.map(name).unwrap_or_default())),
            (Event::Read, ..) => note(format!("read{attempt}")),
            (Event::Decide, ..) => note(format!("decide{attempt}")),
            (Event::Resolve, ..) => note(format!("ask for the outcome{attempt}")),
            (Event::Reads, ..) => note(format!("reads{attempt}")),
            (Event::Finish, ..) => {
                let path = if kind == "-" { String::new() } else { format!(" ({kind})") };
                note(format!("{}{path}{attempt}", escape(&line.detail)))
            }
            (
                Event::Receive
                | Event::Lose
                | Event::Timer
                | Event::Durable
                | Event::Note
                | Event::Fault,
                ..,
            ) => note(format!("{event} {kind}{attempt}")),
        }
    }
}

/// A transaction's name as Mermaid text.
fn name(txn: TxnId) -> String {
    escape(&txn.to_string())
}

fn micros(at: Time, start: Time) -> u64 {
    at.since(start).as_micros() as u64
}

/// The height of the moment `at`.
fn height(moments: &[(u64, f64)], at: u64) -> f64 {
    let after = moments.partition_point(|(moment, _)| *moment <= at);
    let (before, after) = (moments.get(after.wrapping_sub(1)), moments.get(after));
    match (before, after) {
        (Some((t0, y0)), Some((t1, y1))) if t1 > t0 => {
            y0 + (y1 - y0) * (at - t0) as f64 / (t1 - t0) as f64
        }
        (_, Some((_, y))) | (Some((_, y)), None) => *y,
        (None, None) => HEAD,
    }
}

/// Milliseconds from `start` to `at`, to the microsecond.
fn millis(at: Time, start: Time) -> String {
    let micros = at.since(start).as_micros();
    format!("{}.{:03}", micros / 1_000, micros % 1_000)
}

/// Escapes text for XML.
fn escape_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Escapes text for Mermaid: `#` would start a character code, `;` would end the row.
fn escape(text: &str) -> String {
    text.chars().fold(String::new(), |mut text, letter| {
        match letter {
            '#' => text.push_str("#35;"),
            ';' => text.push_str("#59;"),
            _ => text.push(letter),
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_core::time::Duration;
    use orthodrome_core::topology::Topology;

    fn diagram(txn: &str, trace: &str) -> Option<String> {
        let mut diagram = Diagram::new(txn.parse().unwrap(), !txn.contains('#'));
        for line in trace.lines() {
            diagram.read_line(line).unwrap();
        }
        diagram.to_mermaid()
    }

    const TRACE: &str = include_str!("testdata/retried.trace");

    /// Compares with a file, or writes it if `UPDATE_GOLDENFILES` is set as for other goldens.
    fn golden(name: &str, found: &str) {
        let path = format!("{}/src/testdata/{name}", env!("CARGO_MANIFEST_DIR"));
        if std::env::var_os("UPDATE_GOLDENFILES").is_some() {
            std::fs::write(&path, found).unwrap();
        }
        assert_eq!(found, std::fs::read_to_string(&path).unwrap(), "{name} is stale");
    }

    #[test]
    fn a_name_without_an_attempt_shows_every_attempt() {
        golden("retried-all.mmd", &diagram("c4.19", TRACE).unwrap());
    }

    #[test]
    fn a_name_with_an_attempt_shows_that_one_only() {
        golden("retried-second.mmd", &diagram("c4.19#1", TRACE).unwrap());
    }

    #[test]
    fn the_drawing_has_a_line_for_each_message() {
        let drawing = |txn: &str| {
            let mut diagram = Diagram::new(txn.parse().unwrap(), !txn.contains('#'));
            TRACE.lines().for_each(|line| diagram.read_line(line).unwrap());
            diagram.to_svg()
        };
        let svg = drawing("c4.19").unwrap();
        golden("retried-all.svg", &svg);
        let received = diagram("c4.19", TRACE).unwrap().matches("->>").count();
        assert_eq!(svg.matches("<path").count(), received);
        assert_eq!(drawing("c4.1"), None);
        assert_eq!(escape_xml("a<b>&c"), "a&lt;b&gt;&amp;c");
    }

    #[test]
    fn a_transaction_that_is_not_in_the_trace_has_no_diagram() {
        assert_eq!(diagram("c4.1", TRACE), None);
        assert_eq!(diagram("c4.19#2", TRACE), None);
    }

    #[test]
    fn text_that_is_no_trace_line_or_comment_is_refused() {
        let mut diagram = Diagram::new("c4.19".parse().unwrap(), true);
        assert!(diagram.read_line("# anything").is_ok());
        let error = diagram.read_line("1500 n3 fly n1 1000 c4.19 k d").unwrap_err().to_string();
        assert!(error.contains("event") && error.contains("fly"), "{error}");
    }

    #[test]
    fn marks_that_mean_something_to_mermaid_are_escaped() {
        assert_eq!(escape("a#1; b"), "a#35;1#59; b");
    }

    #[test]
    fn the_head_of_a_trace_places_its_nodes() {
        let map = Topology::uniform(2, Duration::ZERO, Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 1, 1).unwrap();
        let head = places(&cluster);
        assert!(
            head.starts_with("# node n1 R0 server\n") && head.contains("# node n4 R1 gateway\n")
        );
        let trace = format!("{head}5000000 n4 begin - - c1.1 - Txn\n");
        assert_eq!(
            diagram("c1.1", &trace).unwrap(),
            "sequenceDiagram\n    participant n4 as n4 R1 gateway\n    Note over n4: begin c1.1 at 0.000 ms\n"
        );
    }
}
