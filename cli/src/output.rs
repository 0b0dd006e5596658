//! Output: results go to standard output, everything else to standard error.

use std::fmt;
use std::io::{self, Write as _};
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// The commit this binary was built from; `unknown` outside of a git checkout.
pub const COMMIT: &str = env!("ORTHODROME_COMMIT");

/// Version and commit.
pub const VERSION: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("ORTHODROME_COMMIT"), ")");

/// Standard output cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("standard output: {0}")]
pub struct StdoutError(pub io::Error);

/// Prints a readable result, and adds a line break if it has none at its end.
pub fn print(text: &str) -> Result<(), StdoutError> {
    let mut stdout = io::stdout().lock();
    let end = if text.ends_with('\n') { "" } else { "\n" };
    write!(stdout, "{text}{end}").and_then(|()| stdout.flush()).map_err(StdoutError)
}

/// Prints to standard error and ignores errors; use `note!`.
pub fn note(text: fmt::Arguments<'_>) {
    // The reader of standard error may have closed it.
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints a machine-readable result: one JSON object on one line.
pub fn print_json(result: &impl Serialize) -> anyhow::Result<()> {
    Ok(print(&serde_json::to_string(result)?)?)
}

/// A table: the first column is left-aligned, figures are right-aligned.
pub fn table<R, C>(header: &[&str], rows: R) -> Table
where
    R: IntoIterator<Item = C>,
    C: IntoIterator<Item = String>,
{
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(header);
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// A progress bar on standard error, visible only on a terminal. With a `length` it shows the
/// completed share, otherwise only activity.
pub fn progress(length: Option<u64>, template: &str) -> anyhow::Result<ProgressBar> {
    let bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template(template)?);
    bar.enable_steady_tick(Duration::from_millis(200));
    Ok(bar)
}

/// A count with its digits in groups of three.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(' ');
        }
        grouped.push(digit);
    }
    grouped
}

/// `part` of `whole` in per cent; `-` if `whole` is 0.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".into();
    }
    format!("{:.1} %", part as f64 * 100.0 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_from_the_right() {
        for (number, text) in [(0, "0"), (999, "999"), (1_000, "1 000"), (12_345_678, "12 345 678")]
        {
            assert_eq!(count(number), text);
        }
        assert_eq!(percent(1, 8), "12.5 %");
        assert_eq!(percent(0, 0), "-");
    }
}
