//! A comparison as one HTML page.

use maud::{Markup, PreEscaped, html};
use orthodrome_core::cluster::Cluster;
use orthodrome_eval::metrics::Summary;
use orthodrome_eval::plot::{Figure, Series};

use super::journey::Journey;
use super::map::Layout;
use super::{
    Args, BY_PRIORITY, BY_REACH, BY_ROLE, COLUMNS, Column, Compared, Swept, cell, differs_in_reach,
    has_both,
};
use crate::output;
use crate::page::{drawing, page};

/// The contents of the page.
pub struct Report<'a> {
    pub args: &'a Args,
    pub cluster: &'a Cluster,
    pub layout: &'a Layout,
    pub compared: &'a [Compared],
    pub swept: &'a [Swept],
    pub journeys: &'a [Journey],
    pub remarks: &'a [String],
    pub wall_seconds: f64,
}

impl Report<'_> {
    /// The page.
    ///
    /// # Errors
    /// A figure cannot be drawn.
    pub fn page(&self) -> anyhow::Result<String> {
        let Self { args, cluster, layout, compared, .. } = self;
        let title = format!("{} on {}", args.workload.workload, cluster.topology.name);
        let runs = || compared.iter().flat_map(|one| &one.runs);
        let body = html! {
            h1 { (title) }
            p.lead { (self.lead()) }
            @for remark in self.remarks { p.differs { (remark) } }
            (self.legend())
            section {
                h2 { "Side by side" }
                p.soft {
                    "Latency is the time from the submission of a transaction to its outcome, aborted attempts included. ÷ floor is the "
                    "ratio of latency to the latency floor: the least that any protocol could have on this topology. WAN trips is the "
                    "number of sequential wide-area round trips. The best value of each column is bold."
                }
                (self.table(COLUMNS))
                @if runs().any(has_both) { h3 { "By priority" } (self.table(BY_PRIORITY)) }
                @if runs().any(differs_in_reach) { h3 { "By distance of the data" } (self.table(BY_REACH)) }
                h3 { "Mbit/s per node, on average" }
                (self.table(BY_ROLE))
            }
            section {
                h2 { "Latency" }
                (drawing(&self.distribution().element((1040, 440))?))
                p.soft { "Distribution of latencies, without the slowest 2 %. A point at 90 % and 400 ms: 90 of 100 transactions took at most 400 ms." }
            }
            section {
                h2 { "By region" }
                p.soft { "Median, 95th and 99th percentile, in milliseconds, of the transactions that clients in each region submitted; first seed." }
                (self.regions())
            }
            @if !self.swept.is_empty() {
                section {
                    h2 { "By offered load" }
                    div.pair { @for figure in self.against_load() { figure {
                        (PreEscaped(figure.element((520, 330))?)) figcaption { (figure.title) }
                    } } }
                    p.soft {
                        "Shorter runs of " (format!("{:?}", self.args.swept_course().duration)) ", first seed; the first "
                        (format!("{:?}", self.args.swept_course().warmup())) " of each are left out."
                    }
                }
            }
            section {
                h2 { "Topology" }
                p.soft {
                    "The distance between two regions is about their round-trip time, in milliseconds (" (cluster.topology.source)
                    "). Below each region are the partitions that prefer a leader there."
                }
                figure { (layout.draw(cluster, "map", &html! {})) }
            }
            @if !self.journeys.is_empty() { (self.step_through()?) }
            section {
                h2 { "How to repeat it" }
                pre { (command()) }
                p.soft { "Commit " (output::COMMIT) ". The same seed at the same commit gives the same run, event for event." }
            }
            script { (PreEscaped(SCRIPT)) }
        };
        Ok(page(&format!("Orthodrome: {title}"), &body))
    }

    fn lead(&self) -> String {
        let placement = &self.args.placement;
        let course = &self.args.course;
        let seeds = match self.args.seeds {
            1 => format!("seed {}", course.seed),
            more => format!("{more} seeds from {}, means ± 95 % confidence intervals", course.seed),
        };
        format!(
            "Simulated, with the protocol code that servers run: {}, {} partitions × {} replicas, {}; {:?}, of \
             which the first {:?} are left out; {seeds}; commit {}; took {:.0} s.",
            format_args!("{} {}", self.args.workload.amount(), self.args.workload.amount_unit()),
            placement.partitions,
            placement.replicas,
            placement.servers(),
            course.duration,
            course.warmup(),
            output::COMMIT,
            self.wall_seconds,
        )
    }

    fn legend(&self) -> Markup {
        html! {
            div.legend.screen role="group" aria-label="Visible protocols" {
                @for (at, one) in self.compared.iter().enumerate() {
                    button aria-pressed="true" data-series=(at) { (swatch(at)) (one.protocol) }
                }
            }
        }
    }

    fn table(&self, columns: &[Column]) -> Markup {
        let best: Vec<Option<f64>> = columns.iter().map(|column| self.best(column)).collect();
        html! {
            div.wide { table {
                tr { th { "protocol" } @for (name, ..) in columns { th.n { (name) } } th { "guarantee" } }
                @for (at, one) in self.compared.iter().enumerate() {
                    tr class={ "r" (at) } {
                        td { (swatch(at)) (one.protocol) }
                        @for ((_, decimals, figure), best) in columns.iter().zip(&best) {
                            @let values: Vec<f64> = one.runs.iter().map(figure).collect();
                            @let is_best = best.is_some_and(|best| mean(&values) == best);
                            td class=(if is_best { "n best" } else { "n" }) { (cell(&values, *decimals)) }
                        }
                        td.soft { (one.guarantee) }
                    }
                }
            } }
        }
    }

    /// The best mean of a column; none if no protocol has one.
    fn best(&self, (name, _, figure): &Column) -> Option<f64> {
        let means =
            self.compared.iter().map(|one| mean(&one.runs.iter().map(figure).collect::<Vec<_>>()));
        let means = means.filter(|mean| mean.is_finite());
        let is_more_better = name.starts_with("commit");
        means.reduce(|a, b| if (a < b) == is_more_better { b } else { a })
    }

    fn distribution(&self) -> Figure {
        let share = |at: usize, all: usize| 100.0 * (at + 1) as f64 / all as f64;
        let series = self.compared.iter().map(|one| {
            let points = one.runs.first().map_or(&[][..], |run| &run.cdf_ms);
            let points = points.iter().enumerate().map(|(at, &ms)| (share(at, points.len()), ms));
            // Without the slowest transaction, which would squeeze the rest of the plot.
            let points = points.filter(|(share, _)| *share < 100.0);
            Series { name: one.protocol.into(), measured: points.collect(), reported: Vec::new() }
        });
        Figure {
            title: "Distribution of latencies".into(),
            note: String::new(),
            x: "% of the transactions with at most this latency".into(),
            y: "ms".into(),
            series: series.collect(),
        }
    }

    fn regions(&self) -> Markup {
        let names: Vec<&str> = self
            .cluster
            .topology
            .regions()
            .map(|region| self.cluster.topology.name_of(region))
            .collect();
        let of = |one: &Compared, name: &str| -> Option<Summary> {
            one.runs.first()?.regions.get(name).copied()
        };
        let all = || {
            self.compared.iter().flat_map(|one| names.iter().filter_map(move |name| of(one, name)))
        };
        let slowest = all().map(|summary| summary.p99).fold(1.0, f64::max);
        let part = |ms: f64| format!("{:.1}%", 100.0 * ms / slowest);
        html! {
            div.wide { table {
                tr { th { "protocol" } @for name in &names { th { (name) } } }
                @for (at, one) in self.compared.iter().enumerate() {
                    tr class={ "r" (at) } {
                        td { (swatch(at)) (one.protocol) }
                        @for name in &names {
                            td { @if let Some(summary) = of(one, name) {
                                b { (format!("{:.0}", summary.p50)) }
                                " " (format!("{:.0}", summary.p95)) " "
                                span.soft { (format!("{:.0}", summary.p99)) }
                                span.range style=(format!("color:var(--s{at})")) {
                                    i style=(format!("left:{};right:calc(100% - {})", part(summary.p50), part(summary.p99))) {}
                                    @for ms in [summary.p50, summary.p95, summary.p99] {
                                        b style=(format!("left:{}", part(ms))) {}
                                    }
                                }
                            } @else { "–" } }
                        }
                    }
                }
            } }
        }
    }

    fn against_load(&self) -> Vec<Figure> {
        let figure = |title: &str, y: &str, value: fn(&Swept) -> f64| {
            let series = self.compared.iter().map(|one| {
                let own = self.swept.iter().filter(|swept| swept.protocol == one.protocol);
                Series {
                    name: one.protocol.into(),
                    measured: own.map(|swept| (swept.load, value(swept))).collect(),
                    reported: Vec::new(),
                }
            });
            let x = self.args.workload.amount_unit().to_owned();
            Figure {
                title: title.into(),
                note: String::new(),
                x,
                y: y.into(),
                series: series.collect(),
            }
        };
        vec![
            figure("Throughput", "committed per second", |swept| swept.result.committed_tps),
            figure("Aborted attempts", "% of all attempts", |swept| {
                100.0 * (1.0 - swept.result.commit_rate)
            }),
            figure("Median latency", "ms", |swept| swept.result.latency_ms.all.p50),
            figure("95th percentile", "ms", |swept| swept.result.latency_ms.all.p95),
        ]
    }

    fn step_through(&self) -> anyhow::Result<Markup> {
        // The data must not contain the end tag of the script.
        let data = serde_json::to_string(self.journeys)?.replace('<', "\\u003c");
        Ok(html! {
            section.journeys {
                h2 { "One transaction, step by step" }
                p.soft {
                    "For each protocol: one transaction of median latency, in a run with few conflicts, with all messages between regions. "
                    "Messages that name the transaction are coloured. Other messages are grey: background messages, and those "
                    "that several transactions share, such as entries of a replicated log."
                }
                p.screen {
                    select aria-label="Protocol" { @for (at, journey) in self.journeys.iter().enumerate() {
                        option value=(at) { (journey.protocol) }
                    } }
                    " " button.play { "Play" } " "
                    input type="range" min="0" max="1000" value="0" style="width:20rem" aria-label="Time";
                    " " output {}
                }
                div.journey {
                    figure { (self.layout.draw(self.cluster, "journey-map", &html! { g.messages {} })) }
                    div.steps { table { thead { tr { th.n { "sent" } th.n { "arrived" } th { "message" } th { "from" } th { "to" } } } tbody {} } }
                }
            }
            script { "const journeys=" (PreEscaped(data)) ";" }
        })
    }
}

fn swatch(series: usize) -> Markup {
    html! { span.swatch style=(format!("background:var(--s{series})")) {} }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The command line of this process.
fn command() -> String {
    let quoted = |word: String| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=".contains(c);
        if !word.is_empty() && word.chars().all(is_plain) {
            word
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    };
    let words = std::env::args().skip(1).map(quoted);
    ["orthodrome".to_owned()].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}

const SCRIPT: &str = include_str!("report.js");
