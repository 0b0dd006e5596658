//! `trace`: views of a recorded trace.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use orthodrome_core::id::TxnId;
use orthodrome_core::time::Time;
use orthodrome_core::trace::ParseLineError;
use orthodrome_eval::diagram::Diagram;
use orthodrome_eval::listing::{Listed, Listing};
use serde::Serialize;

use crate::{Status, output};

/// Show parts of a trace, which `sim --trace` records
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    view: View,
}

#[derive(clap::Subcommand)]
enum View {
    List(ListArgs),
    Diagram(DiagramArgs),
}

/// List the transactions of a trace, in the order in which they began
///
/// Times are in milliseconds: the begin since the start of the run, and the latency from the first attempt to the
/// outcome of the last one. Messages that concern several transactions are not counted.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  orthodrome trace list run.trace
  orthodrome trace list run.trace --slowest 10            # then draw one: trace diagram run.trace --txn …
  orthodrome trace list run.trace --outcome aborted --json")]
struct ListArgs {
    /// Trace file, written by `sim --trace`
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// List only this many transactions, those with the highest latency first; pending ones count as the slowest
    #[arg(long, value_name = "N")]
    slowest: Option<usize>,
    /// List only transactions that ended so
    #[arg(long, value_name = "OUTCOME")]
    outcome: Option<OutcomeName>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What became of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum OutcomeName {
    /// Its last attempt committed
    Committed,
    /// Its last attempt aborted
    Aborted,
    /// Its client received no outcome
    Unknown,
    /// The trace ends before its outcome
    Pending,
}

/// One transaction, as `--json` prints it.
#[derive(Serialize)]
struct Row {
    txn: String,
    /// The gateway that ran it, and where that is; empty if the trace does not say it.
    gateway: String,
    place: String,
    began_ms: f64,
    /// Null while it is pending.
    latency_ms: Option<f64>,
    attempts: u32,
    messages: u64,
    /// `committed@42`, `aborted(conflict)`, `unknown` or `pending`.
    outcome: String,
    /// The protocol's path; empty while it is pending.
    path: String,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Printed {
    trace: String,
    transactions: Vec<Row>,
}

/// Print the messages of one transaction as a sequence diagram, in Mermaid or SVG
///
/// Each arrow shows the kind of a message and the times when it was sent and received, in milliseconds
/// since the transaction was submitted. Messages that concern several transactions are left out.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  orthodrome sim --protocol carousel-basic --topology azure5 --workload retwis --duration 2s \\
      --trace run.trace
  orthodrome trace diagram run.trace --txn c4.19      # every attempt at the transaction
  orthodrome trace diagram run.trace --txn c4.19#1    # its second attempt only
  orthodrome trace diagram run.trace --txn c4.19 --svg > c4.19.svg")]
struct DiagramArgs {
    /// Trace file, written by `sim --trace`
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// Print SVG instead of Mermaid; time runs downwards
    #[arg(long)]
    svg: bool,
    /// Transaction: c4.19 for all its attempts, c4.19#0 for the first attempt, c4.19#1 for the second
    #[arg(long, value_name = "ID")]
    txn: String,
}

/// Prints the requested view.
pub fn run(args: Args) -> anyhow::Result<Status> {
    match args.view {
        View::List(args) => list(&args),
        View::Diagram(args) => diagram(&args),
    }
}

/// Passes each line of a trace to `line`.
fn read(
    trace: &Path,
    mut take: impl FnMut(&str) -> Result<(), ParseLineError>,
) -> anyhow::Result<()> {
    let place = trace.display();
    let file = File::open(trace).with_context(|| format!("{place}: cannot open the trace"))?;
    let size = file.metadata().with_context(|| format!("{place}"))?.len();
    let bar = output::progress(Some(size), "reading {bar:30} {bytes}/{total_bytes} {eta}")?;
    let lines = BufReader::with_capacity(1 << 20, bar.wrap_read(file)).lines();
    for (number, line) in (1..).zip(lines) {
        let line = line.with_context(|| format!("{place}:{number}: cannot read the trace"))?;
        take(&line).map_err(|error| {
            anyhow!("{place}:{number}: {error}; use a file that `sim --trace` wrote")
        })?;
    }
    bar.finish_and_clear();
    Ok(())
}

fn list(args: &ListArgs) -> anyhow::Result<Status> {
    let mut listing = Listing::default();
    read(&args.trace, |line| listing.read_line(line))?;
    let mut all = listing.in_order();
    let found = all.len();
    all.retain(|listed| args.outcome.is_none_or(|wanted| wanted == outcome_of(listed)));
    if let Some(most) = args.slowest {
        // Stable: equally slow ones stay in order.
        all.sort_by_key(|listed| std::cmp::Reverse(listed.latency().unwrap_or(Duration::MAX)));
        all.truncate(most);
    }
    let rows = all.into_iter().map(|listed| row(listed, &listing));
    if args.json {
        let trace = args.trace.display().to_string();
        output::print_json(&Printed { trace, transactions: rows.collect() })?;
        return Ok(Status::Passed);
    }
    let header =
        ["transaction", "gateway", "began", "latency", "attempts", "messages", "outcome", "path"];
    let shown: Vec<_> = rows
        .map(|row| {
            let latency = row.latency_ms.map(|time| format!("{time:.3}")).unwrap_or_default();
            let gateway = format!("{} {}", row.gateway, row.place.replace(" gateway", ""));
            let began = format!("{:.3}", row.began_ms);
            let counts = [row.attempts.to_string(), row.messages.to_string()];
            let [attempts, messages] = counts;
            // The timestamp of a commit is of no use to people.
            let outcome = row.outcome.split('@').next().unwrap_or_default().to_owned();
            [
                row.txn,
                gateway.trim().to_owned(),
                began,
                latency,
                attempts,
                messages,
                outcome,
                row.path,
            ]
        })
        .collect();
    if shown.is_empty() {
        let why = if found == 0 { "has no transaction" } else { "has no such transaction" };
        bail!("{} {why}; it has {found} in all", args.trace.display());
    }
    output::print(&output::table(&header, shown).to_string())?;
    Ok(Status::Passed)
}

fn outcome_of(listed: &Listed) -> OutcomeName {
    match &listed.end {
        None => OutcomeName::Pending,
        Some((_, outcome, _)) if outcome.starts_with("committed") => OutcomeName::Committed,
        Some((_, outcome, _)) if outcome.starts_with("aborted") => OutcomeName::Aborted,
        Some(_) => OutcomeName::Unknown,
    }
}

fn row(listed: &Listed, listing: &Listing) -> Row {
    let millis = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
    let (outcome, path) = match &listed.end {
        Some((_, outcome, path)) => (outcome.clone(), path.clone()),
        None => ("pending".into(), String::new()),
    };
    Row {
        txn: listed.txn.to_string(),
        gateway: listed.gateway.map(|node| node.to_string()).unwrap_or_default(),
        place: listed.gateway.map(|node| listing.place(node).to_owned()).unwrap_or_default(),
        began_ms: millis(listed.began.since(Time::ZERO)),
        latency_ms: listed.latency().map(millis),
        attempts: listed.attempts,
        messages: listed.messages,
        outcome,
        path,
    }
}

fn diagram(args: &DiagramArgs) -> anyhow::Result<Status> {
    let txn: TxnId =
        args.txn.parse().map_err(|error| anyhow!("--txn: {error}; for example c4.19"))?;
    let mut diagram = Diagram::new(txn, !args.txn.contains('#'));
    read(&args.trace, |line| diagram.read_line(line))?;
    let place = args.trace.display();
    let drawn = if args.svg { diagram.to_svg() } else { diagram.to_mermaid() };
    let Some(text) = drawn else {
        bail!(
            "--txn {}: {place} has no event of this transaction; use the id of one that `orthodrome trace list {place}` shows",
            args.txn
        );
    };
    output::print(&text)?;
    Ok(Status::Passed)
}
