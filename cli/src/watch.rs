//! `watch`: the changes of a range of keys as they happen, on a terminal, for a pipe, or in a file.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use orthodrome_client::{Change, Changes, Client, Error, Key, KeyRange, Timestamp, Watch};
use serde::Serialize;
use tokio::runtime::Runtime;

use crate::connect::Connect;
use crate::{Status, common, output, serve};

/// Print the changes of keys as they are committed, in the order of their commit timestamps
///
/// A watch shows every change of its keys, once: also when nodes fail, and when it goes on later with
/// --after or --output. Servers remember changes for ten seconds at least, and usually until they have
/// written 16 MiB more. A watch that goes on after a longer time may end with an error; it never leaves
/// changes out.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  orthodrome watch stock/                          # all keys that begin with stock/
  orthodrome watch --for 10s --keys
  orthodrome watch --output changes.jsonl          # the next run goes on where this one stops
  orthodrome watch orders/ --json | kcat -P -b broker:9092 -t orders

Exit status: 0 stopped by Ctrl-C, SIGTERM or --for; 1 the servers have forgotten changes; 2 bad usage, or
no gateway can be reached.")]
pub struct Args {
    /// Watch the keys that begin with this [default: all keys]
    #[arg(value_name = "PREFIX", conflicts_with_all = ["from", "until"])]
    prefix: Option<String>,
    /// Watch from this key on
    #[arg(long, value_name = "KEY")]
    from: Option<String>,
    /// Watch the keys before this one
    #[arg(long, value_name = "KEY")]
    until: Option<String>,
    /// Begin after this timestamp: the last `through` of another watch
    /// [default: now]
    #[arg(long, value_name = "TIMESTAMP")]
    after: Option<u64>,
    /// Leave the values out
    #[arg(long)]
    keys: bool,
    /// Stop after this time [default: at Ctrl-C]
    #[arg(long = "for", value_name = "TIME", value_parser = common::duration)]
    time: Option<Duration>,
    /// Print one JSON object for each change, and one, with `through`, when everything up to a timestamp
    /// was printed
    #[arg(long)]
    json: bool,
    /// Append what --json prints to this file. If it has lines of an earlier watch, go on where that one
    /// stopped
    #[arg(long, value_name = "FILE", conflicts_with_all = ["after", "json"])]
    output: Option<PathBuf>,
    /// Time limit for reaching a gateway, at the beginning and when one fails
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = common::duration)]
    deadline: Duration,
    #[command(flatten)]
    connect: Connect,
}

/// A line of JSON: a change, or how far the watch has come.
#[derive(Serialize, Default)]
struct Line {
    #[serde(skip_serializing_if = "Option::is_none")]
    timestamp: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// If the key is no UTF-8 text.
    #[serde(skip_serializing_if = "Option::is_none")]
    key_hex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_hex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deleted: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    txn: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    through: Option<u64>,
    /// The first line of a file: what it has the changes of.
    #[serde(skip_serializing_if = "Option::is_none")]
    watch: Option<String>,
}

/// Where the changes go.
enum Sink {
    Text,
    Json,
    File(File),
}

/// Runs the command.
///
/// # Errors
/// The cluster cannot be reached, or an option cannot be used.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let (mut sink, mut after) = (Sink::Text, args.after.map(Timestamp));
    if args.json {
        sink = Sink::Json;
    }
    if let Some(path) = &args.output {
        let (file, through) = open(path, &described(args))?;
        (sink, after) = (Sink::File(file), through.map(Timestamp));
        if let Some(through) = through {
            note!("{}: going on after timestamp {through}", path.display());
        }
    }
    let runtime = Runtime::new().context("cannot start the runtime")?;
    let config = args.connect.config(args.connect.endpoints())?.deadline(args.deadline);
    args.connect.note_refusals();
    runtime.block_on(async {
        let client = Client::connect(config).await.with_context(|| {
            format!("cannot connect to {}", args.connect.endpoints().join(", "))
        })?;
        let mut watch = client.watch(range(args)).deadline(args.deadline);
        if args.keys {
            watch = watch.keys_only();
        }
        if let Some(after) = after {
            watch = watch.after(after);
        }
        let stopped = serve::stop_signal()?;
        let end = async {
            match args.time {
                Some(time) => tokio::time::sleep(time).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            shown = show(&mut watch, &mut sink, args.keys) => shown,
            _ = stopped => Ok(Status::Passed),
            () = end => Ok(Status::Passed),
        }
    })
}

fn range(args: &Args) -> KeyRange {
    match (&args.prefix, &args.from, &args.until) {
        (Some(prefix), ..) => KeyRange::prefix(prefix.as_bytes()),
        (None, from, until) => {
            let key = |text: &String| Key::from(text.as_str());
            KeyRange {
                from: from.as_ref().map(key).unwrap_or_default(),
                until: until.as_ref().map(key),
            }
        }
    }
}

/// Shows changes until the watch cannot go on.
async fn show(watch: &mut Watch, sink: &mut Sink, keys_only: bool) -> anyhow::Result<Status> {
    let mut is_first = true;
    loop {
        let changes = match watch.next().await {
            Ok(changes) => changes,
            Err(error @ Error::Forgotten(_)) => {
                note!("{error}");
                return Ok(Status::Failed);
            }
            Err(error) => return Err(error.into()),
        };
        if std::mem::take(&mut is_first) {
            note!("watching from timestamp {} on; Ctrl-C stops", changes.through.0);
        }
        put(sink, changes, keys_only)?;
    }
}

fn put(sink: &mut Sink, changes: Changes, keys_only: bool) -> anyhow::Result<()> {
    let mut text = String::new();
    let Changes { changes, through } = changes;
    match sink {
        Sink::Text => {
            for Change { key, version, value } in changes {
                let at = version.timestamp.0;
                text += &match value {
                    Some(value) => format!("{at}  {key} = {value}\n"),
                    None if keys_only => format!("{at}  {key}\n"),
                    None => format!("{at}  {key} deleted\n"),
                };
            }
            if !text.is_empty() {
                output::print(&text)?;
            }
        }
        Sink::Json | Sink::File(_) => {
            for change in changes {
                text += &serde_json::to_string(&line(change, keys_only))?;
                text.push('\n');
            }
            let end = Line { through: Some(through.0), ..Line::default() };
            text += &serde_json::to_string(&end)?;
            text.push('\n');
            if let Sink::File(file) = sink {
                // One write and one flush for each batch: then only its own lines can be incomplete.
                file.write_all(text.as_bytes()).context("--output: cannot write")?;
                file.sync_data().context("--output: cannot write")?;
            } else {
                output::print(&text)?;
            }
        }
    }
    Ok(())
}

fn line(change: Change, keys_only: bool) -> Line {
    let Change { key, version, value } = change;
    let (key, key_hex) = text_or_hex(key.bytes());
    let deleted = (!keys_only && value.is_none()).then_some(true);
    let (value, value_hex) = value.map_or((None, None), |value| text_or_hex(&value.0));
    let (timestamp, txn) = (Some(version.timestamp.0), Some(version.writer.to_string()));
    Line { timestamp, key, key_hex, value, value_hex, deleted, txn, ..Line::default() }
}

/// Bytes as text, or else in hexadecimal.
fn text_or_hex(bytes: &[u8]) -> (Option<String>, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (Some(text.to_owned()), None),
        Err(_) => (None, Some(bytes.iter().map(|byte| format!("{byte:02x}")).collect())),
    }
}

/// What is watched, for the first line of a file.
fn described(args: &Args) -> String {
    let KeyRange { from, until } = range(args);
    let until = until.map(|until| until.to_string()).unwrap_or_default();
    let what = if args.keys { "keys" } else { "keys and values" };
    format!("{what} from \"{from}\" until \"{until}\"")
}

/// Opens the file, without what an interrupted watch has written after its last complete batch. Returns
/// where to go on.
fn open(path: &Path, watch: &str) -> anyhow::Result<(File, Option<u64>)> {
    let context = || format!("--output {}: cannot open the file", path.display());
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        bail!("--output {}: not a regular file; use --json for a pipe", path.display());
    }
    let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let mut file = options.with_context(context)?;
    if file.try_lock().is_err() {
        bail!("--output {}: another process writes this file", path.display());
    }
    let (mut end, mut at, mut through, mut number) = (0, 0, None, 0_u64);
    // It begins with the first line of such a file.
    let mut is_ours = false;
    let mut lines = BufReader::new(&file);
    let mut text = Vec::new();
    while lines.read_until(b'\n', &mut text).with_context(context)? > 0 {
        number += 1;
        at += text.len() as u64;
        is_ours |= number == 1 && text.starts_with(b"{\"watch\":");
        if !text.ends_with(b"\n") {
            break;
        }
        let found: serde_json::Value = match serde_json::from_slice(&text) {
            Ok(found) => found,
            Err(_) => bail!(
                "--output {}: line {number} is no JSON; use a new file, or one that `watch` has written",
                path.display()
            ),
        };
        if let Some(other) = found.get("watch").and_then(serde_json::Value::as_str) {
            anyhow::ensure!(
                other == watch,
                "--output {}: the file has changes of {other}, and not of {watch}; use a new file",
                path.display()
            );
            end = at;
        }
        if let Some(found) = found.get("through").and_then(serde_json::Value::as_u64) {
            (end, through) = (at, Some(found));
        }
        text.clear();
    }
    if through.is_none() && at > 0 && !is_ours {
        bail!(
            "--output {}: the file does not say how far its watch had come; use a new file",
            path.display()
        );
    }
    file.set_len(end).with_context(context)?;
    file.seek(SeekFrom::End(0)).with_context(context)?;
    if end == 0 {
        let first = Line { watch: Some(watch.to_owned()), ..Line::default() };
        writeln!(file, "{}", serde_json::to_string(&first)?).with_context(context)?;
    }
    Ok((file, through))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_cut_behind_its_last_complete_batch() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("changes.jsonl");
        let complete = "{\"key\":\"a\",\"timestamp\":7}\n{\"through\":9}\n";
        let torn = format!("{complete}{{\"key\":\"b\",\"timestamp\":10}}\n{{\"key");
        std::fs::write(&path, torn).unwrap();
        let (mut file, through) = open(&path, "all").unwrap();
        assert_eq!(through, Some(9));
        assert!(open(&path, "all").unwrap_err().to_string().contains("another process"));
        file.write_all(b"{\"through\":12}\n").unwrap();
        drop(file);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, format!("{complete}{{\"through\":12}}\n"));
        assert_eq!(open(&path, "all").unwrap().1, Some(12));
    }

    #[test]
    fn a_file_of_something_else_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notes.txt");
        for text in ["hello\n", "{\"key\":\"a\"}\n", "[]"] {
            std::fs::write(&path, text).unwrap();
            assert!(open(&path, "all").is_err(), "{text}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        assert!(open(directory.path(), "all").is_err());
        assert!(open(Path::new("/dev/null"), "all").is_err());
    }

    /// A process may die right after it has made the file.
    #[test]
    fn a_file_says_what_it_has_the_changes_of() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("changes.jsonl");
        for _ in 0..2 {
            assert_eq!(open(&path, "a").unwrap().1, None);
        }
        let refused = open(&path, "b").unwrap_err().to_string();
        assert!(refused.contains("changes of a, and not of b"), "{refused}");
        let first = "{\"watch\":\"a\"}\n";
        // A loss of power may have cut the first batch, or the first line.
        for text in [format!("{first}{{\"thr"), first[..9].to_owned(), first.to_owned()] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(open(&path, "a").unwrap().1, None);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), first);
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_hexadecimal() {
        assert_eq!(text_or_hex("é".as_bytes()), (Some("é".into()), None));
        assert_eq!(text_or_hex(&[0xff, 1]), (None, Some("ff01".into())));
    }
}
