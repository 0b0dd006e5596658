//! `trace`: views of a recorded trace.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;

use anyhow::{Context as _, anyhow, bail};
use orthodrome_core::id::TxnId;
use orthodrome_eval::diagram::Diagram;

use crate::{Status, output};

/// Show parts of a trace, which `sim --trace` records
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    view: View,
}

#[derive(clap::Subcommand)]
enum View {
    Diagram(DiagramArgs),
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
        View::Diagram(args) => diagram(&args),
    }
}

fn diagram(args: &DiagramArgs) -> anyhow::Result<Status> {
    let txn: TxnId =
        args.txn.parse().map_err(|error| anyhow!("--txn: {error}; for example c4.19"))?;
    let place = args.trace.display();
    let file =
        File::open(&args.trace).with_context(|| format!("{place}: cannot open the trace"))?;
    let size = file.metadata().with_context(|| format!("{place}"))?.len();
    let bar = output::progress(Some(size), "reading {bar:30} {bytes}/{total_bytes} {eta}")?;
    let mut diagram = Diagram::new(txn, !args.txn.contains('#'));
    let lines = BufReader::with_capacity(1 << 20, bar.wrap_read(file)).lines();
    for (number, line) in (1..).zip(lines) {
        let line = line.with_context(|| format!("{place}:{number}: cannot read the trace"))?;
        diagram.read_line(&line).map_err(|error| {
            anyhow!("{place}:{number}: {error}; use a file that `sim --trace` wrote")
        })?;
    }
    bar.finish_and_clear();
    let drawn = if args.svg { diagram.to_svg() } else { diagram.to_mermaid() };
    let Some(text) = drawn else {
        bail!(
            "--txn {}: {place} has no event of this transaction; use the id of one that it has, such as c4.19",
            args.txn
        );
    };
    output::print(&text)?;
    Ok(Status::Passed)
}
