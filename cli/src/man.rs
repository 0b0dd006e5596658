//! `man`: manual pages for `man orthodrome` and for every command.

use std::path::PathBuf;

use anyhow::Context as _;

use crate::{Status, output};

/// Write the manual pages of all commands to a directory
///
/// There is one page for the program and one for each command, such as orthodrome-serve.1, with the text of
/// `--help`. Packages contain them.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  orthodrome man ~/.local/share/man/man1
  orthodrome man /tmp/pages && man /tmp/pages/orthodrome-serve.1")]
pub struct Args {
    /// Directory for the pages; created if it does not exist. Pages of the same name are replaced
    dir: PathBuf,
}

/// Writes the pages.
///
/// # Errors
/// The directory cannot be written.
pub fn run(args: &Args, command: clap::Command) -> anyhow::Result<Status> {
    let place = args.dir.display();
    std::fs::create_dir_all(&args.dir)
        .with_context(|| format!("{place}: cannot create the directory"))?;
    // The version of a page has no commit, so that it changes only with the program.
    let command = command.version(env!("CARGO_PKG_VERSION"));
    clap_mangen::generate_to(command, &args.dir)
        .with_context(|| format!("{place}: cannot write the pages"))?;
    let pages = std::fs::read_dir(&args.dir).with_context(|| format!("{place}"))?;
    let count = pages.filter_map(Result::ok).filter(|page| {
        page.file_name()
            .to_str()
            .is_some_and(|name| name.starts_with("orthodrome") && name.ends_with(".1"))
    });
    output::print(&format!("{} pages are in {place}", count.count()))?;
    Ok(Status::Passed)
}
