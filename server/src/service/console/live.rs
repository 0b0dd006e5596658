//! The parts of the page about transactions of this gateway.

use std::time::Duration;

use maud::{Markup, html};
use orthodrome_core::Cluster;
use tokio::time::Instant;

use super::charts::{Line, chart};
use super::text;
use crate::gateway::{Pending, PendingTxns, Stage};
use crate::service::live::{Class, HISTORY, HotKey, Journey, KEPT, REASONS, SHOWN, Second, WINDOW};

/// Width of the drawing of a journey, in its own unit.
const JOURNEY: f64 = 100.0;

type Select = fn(&Second) -> &Class;
const CLASSES: [(&str, Select); 2] =
    [("high", |second| &second.high), ("low", |second| &second.low)];

fn last(seconds: &[Second], most: usize) -> &[Second] {
    seconds.get(seconds.len().saturating_sub(most)..).unwrap_or_default()
}

/// Events a second, over these seconds.
fn rate(seconds: &[Second], events: impl Fn(&Second) -> u64) -> f64 {
    let length: f64 = seconds.iter().map(|second| second.length).sum();
    let all: u64 = seconds.iter().map(events).sum();
    if length > 0.0 { all as f64 / length } else { 0.0 }
}

/// Throughput and latency now.
pub(super) fn now(seconds: &[Second]) -> Markup {
    let recent = last(seconds, WINDOW);
    html! {
        div class="wide" { table {
            thead { tr {
                th { "Priority" }
                th class="n" { "commits/s" } th class="n" { "aborts/s" } th class="n" { "unknown/s" }
                th class="n" { "p50 ms" } th class="n" { "p95 ms" } th class="n" { "p99 ms" }
            } }
            tbody { @for (name, select) in CLASSES {
                tr {
                    td { (name) }
                    td class="n" { (text::number(rate(recent, |second| select(second).committed))) }
                    td class="n" { (text::number(rate(recent, |second| select(second).aborted))) }
                    td class="n" { (text::number(rate(recent, |second| select(second).unknown))) }
                    @match recent.last().and_then(|second| select(second).latency_ms) {
                        Some(all) => @for value in all { td class="n" { (text::number(value)) } },
                        None => @for _ in 0..3 { td class="n soft" { "–" } },
                    }
                }
            } }
        } }
    }
}

/// The last minutes.
pub(super) fn charts(seconds: &[Second]) -> Markup {
    let line = |name, class, value: &dyn Fn(&Second) -> Option<f64>| Line {
        name,
        class,
        values: seconds.iter().map(value).collect(),
    };
    let each = |second: &Second, count: u64| Some(count as f64 / second.length.max(1e-3));
    let rates = [
        line("high", "s2", &|second| each(second, second.high.committed)),
        line("low", "s1", &|second| each(second, second.low.committed)),
        line("aborted", "bad", &|second| each(second, second.low.aborted + second.high.aborted)),
    ];
    let lines = |select: Select| -> Vec<Line> {
        let percentiles = [("p50", "s0"), ("p95", "s1"), ("p99", "s2")].into_iter().enumerate();
        percentiles
            .map(|(at, (name, class))| {
                line(name, class, &|second| select(second).latency_ms?.get(at).copied())
            })
            .collect()
    };
    let [(_, high), (_, low)] = CLASSES;
    html! {
        div class="charts" {
            (chart("Transactions a second", "/s", &rates))
            (chart("Latency, high priority", "ms", &lines(high)))
            (chart("Latency, low priority", "ms", &lines(low)))
        }
    }
}

/// Aborts by reason.
pub(super) fn aborts(seconds: &[Second]) -> Markup {
    let of = |at: usize| move |second: &Second| second.reasons.get(at).copied().unwrap_or_default();
    let total = |at| seconds.iter().map(of(at)).sum::<u64>();
    html! {
        table {
            thead { tr {
                th { "Reason" }
                th class="n" { "aborts/s" }
                th class="n" { "in " (HISTORY / 60) " min" }
            } }
            tbody { @for (at, reason) in REASONS.iter().enumerate() {
                tr class=[(total(at) == 0).then_some("off")] {
                    td { (reason) }
                    td class="n" { (text::number(rate(last(seconds, WINDOW), of(at)))) }
                    td class="n" { (total(at)) }
                }
            } }
        }
    }
}

/// Rows without content, so that the table has the same height whatever it lists.
fn fill(rows: usize, most: usize, columns: usize) -> Markup {
    html! {
        @for _ in rows..most { tr class="blank" { td colspan=(columns) { "\u{a0}" } } }
    }
}

/// The keys that are accessed most often.
pub(super) fn keys(keys: &[HotKey], cluster: &Cluster) -> Markup {
    let partition = |key: &HotKey| {
        // Of a key that was cut, the partition is unknown.
        let is_whole = key.bytes.len() == key.length;
        is_whole.then(|| cluster.partition_of(&key.bytes.to_vec().into()))
    };
    html! {
        div class="wide" { table class="fixed" {
            thead { tr {
                th { "Key" } th { "Partition" } th class="n" { "of accesses" } th class="n" { "writes" }
            } }
            tbody {
                @for key in keys {
                    tr {
                        td class="key" { code { (text::key(&key.bytes, key.length)) } }
                        td { @if let Some(partition) = partition(key) { (partition) } @else { "–" } }
                        td class="n" { (text::number(key.share * 100.0)) " %" }
                        td class="n" { (format!("{:.0} %", key.writes * 100.0)) }
                    }
                }
                (fill(keys.len(), SHOWN, 4))
            }
        } }
    }
}

fn stage(stage: Stage) -> &'static str {
    match stage {
        Stage::Reads => "waits for reads",
        Stage::Client => "waits for its client",
        Stage::Outcome => "in doubt",
    }
}

/// Transactions in flight.
pub(super) fn pending(pending: Option<&PendingTxns>) -> Markup {
    let Some(pending) = pending else {
        return html! { p class="bad" { "The gateway did not answer within a second." } };
    };
    let row = |txn: &Pending| {
        html! { tr {
            td { (txn.txn) }
            td { (txn.kind) }
            td { (txn.priority) }
            td class="n" { (text::age(txn.age)) }
            td { (stage(txn.stage)) }
            td class="n" { (text::age(txn.waits)) }
        } }
    };
    html! {
        p {
            strong { (pending.in_doubt) } " in doubt"
            @if pending.in_doubt > 0 { ", for up to " (text::age(pending.in_doubt_age_max)) }
            "; " strong { (pending.open) } " open, waiting for their clients"
            @if pending.open > 0 { ", the oldest for " (text::age(pending.open_age_max)) }
            "."
        }
        div class="wide" { table class="fixed" {
            thead { tr {
                th { "Transaction" } th { "Kind" } th { "Priority" } th class="n" { "Age" }
                th { "State" } th class="n" { "for" }
            } }
            tbody {
                @for txn in pending.oldest.iter().take(KEPT) { (row(txn)) }
                (fill(pending.oldest.len().min(KEPT), KEPT, 6))
            }
        } }
    }
}

/// Journeys of transactions that ended.
pub(super) fn journeys(journeys: &[Journey], now: Instant) -> Markup {
    let longest = journeys.iter().map(|journey| journey.took).max().unwrap_or_default();
    let at = |time: Option<Duration>| time.map_or_else(|| "–".to_owned(), text::millis);
    let row = |journey: &Journey| {
        let ended = now.saturating_duration_since(journey.ended);
        html! { tr {
            td { (journey.txn) }
            td { (journey.kind) }
            td { (journey.priority) }
            td class="journey" { (drawing(journey, longest)) }
            td class="n" { (at(journey.reads)) }
            td class="n" { (at(journey.decided)) }
            td class="n" { (text::millis(journey.took)) }
            @match &journey.outcome {
                Ok(outcome) => td class=[(*outcome == "unknown").then_some("bad")] { (outcome) },
                Err(reason) => td { "aborted: " (reason) },
            }
            td { (journey.path) }
            td class="n" { (text::age(Duration::from_secs(ended.as_secs()).max(Duration::from_secs(1)))) " ago" }
        } }
    };
    html! {
        div class="wide" { table class="fixed" {
            thead { tr {
                th { "Transaction" } th { "Kind" } th { "Priority" } th { "Journey" }
                th class="n" { "reads ms" } th class="n" { "decision ms" } th class="n" { "outcome ms" }
                th { "Outcome" } th { "Path" } th class="n" { "Ended" }
            } }
            tbody {
                @for journey in journeys { (row(journey)) }
                (fill(journeys.len(), KEPT, 10))
            }
        } }
    }
}

/// The phases of a journey, as wide as they are long.
fn drawing(journey: &Journey, longest: Duration) -> Markup {
    let scale = |time: Duration| {
        let part = time.as_secs_f64() / longest.as_secs_f64().max(1e-9);
        (part * JOURNEY * 10.0).round() / 10.0
    };
    let took = scale(journey.took);
    let reads = journey.reads.map(scale);
    let decided = journey.decided.map(scale);
    // With one round, there is one phase: from the request to the outcome.
    let phases = match (reads, decided) {
        (None, None) => vec![("s2", 0.0, took)],
        (Some(reads), None) => vec![("s0", 0.0, reads), ("s2", reads, took)],
        (None, Some(decided)) => vec![("s1", 0.0, decided), ("s2", decided, took)],
        (Some(reads), Some(decided)) => {
            vec![("s0", 0.0, reads), ("s1", reads, decided), ("s2", decided, took)]
        }
    };
    html! {
        svg viewBox={ "0 0 " (JOURNEY) " 10" } preserveAspectRatio="none" role="img"
            aria-label="phases of the transaction" {
            @for (class, from, to) in phases {
                rect class=(class) x=(from) y="1" width=(format!("{:.1}", (to - from).max(0.4))) height="8" {}
            }
        }
    }
}
