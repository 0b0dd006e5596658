//! `topology`: makes a topology file from measured round-trip times.

use std::fmt::Write as _;
use std::fs;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::topology::Topology;

use crate::{Status, output};

/// Make a topology file from measured round-trip times
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Measure(MeasureArgs),
    Join(JoinArgs),
}

/// Measure the round-trip times from this machine to other regions
///
/// The round-trip time is the time that a TCP connection takes to be accepted, so any port works on which something
/// listens: a database, SSH, an orthodrome node. For each connection the command prints one line `HERE THERE MILLISECONDS`.
/// `topology join` reads these lines; you can also write them by hand, for example from the output of `ping`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  orthodrome topology measure --region VA --to WA=db-wa:5432,SG=db-sg:22 > va.rtt
  orthodrome topology join --name ours va.rtt wa.rtt sg.rtt > ours.toml

Exit status: 0 every region was measured, 2 bad usage, or a region could not be reached.")]
struct MeasureArgs {
    /// Region of this machine
    #[arg(long, value_name = "REGION", value_parser = region)]
    region: String,
    /// Other regions, each with the address of a TCP listener there
    #[arg(long, value_name = "REGION=HOST:PORT,…", value_delimiter = ',', required = true, value_parser = target)]
    to: Vec<(String, String)>,
    /// Connections to each region
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    count: u32,
}

/// Make a topology file from measured round-trip times
///
/// Reads lines `FROM TO MILLISECONDS`. The round-trip time between two regions is the median of all their lines, in either
/// direction. Lines from a region to itself give the round-trip time between machines of one region [default: 0.5 ms].
/// Prints the topology file.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  orthodrome topology join --name ours va.rtt wa.rtt sg.rtt > ours.toml
  orthodrome compare --topology ours.toml --workload retwis --rate 200

Exit status: 0 the topology is complete, 2 bad usage, or a pair of regions has no measurement.")]
struct JoinArgs {
    /// Name of the topology
    #[arg(long, value_name = "NAME", default_value = "measured")]
    name: String,
    /// Files with measurements, as `topology measure` prints them
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

/// Time limit for one connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// The round-trip time between machines of one region, in milliseconds, if it was not measured.
const LOCAL_MS: f64 = 0.5;

/// Parses the name of a region.
fn region(text: &str) -> Result<String, String> {
    let is_good = |letter: char| letter.is_alphanumeric() || letter == '-' || letter == '_';
    if !text.is_empty() && text.chars().all(is_good) {
        Ok(text.to_owned())
    } else {
        Err("use only letters, digits, - and _".into())
    }
}

fn target(text: &str) -> Result<(String, String), String> {
    let (name, address) = text.split_once('=').ok_or("use REGION=HOST:PORT")?;
    Ok((region(name)?, address.to_owned()))
}

/// Runs `measure` or `join`.
///
/// # Errors
/// A region cannot be reached, a file cannot be read, or measurements are missing.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    match &args.command {
        Command::Measure(args) => measure(args)?,
        Command::Join(args) => {
            let mut texts = Vec::new();
            for path in &args.files {
                let name = path.display().to_string();
                let text = fs::read_to_string(path).with_context(|| name.clone())?;
                texts.push((name, text));
            }
            output::print(&join(&args.name, &texts)?)?;
        }
    }
    Ok(Status::Passed)
}

fn measure(args: &MeasureArgs) -> anyhow::Result<()> {
    let bar = output::progress(
        Some(args.to.len() as u64 * u64::from(args.count)),
        "{spinner} {msg}: {pos}/{len} connections {bar:20} {elapsed}",
    )?;
    for (name, address) in &args.to {
        bar.set_message(name.clone());
        let place = || format!("--to {name}={address}");
        let found = address.to_socket_addrs().with_context(place)?.next();
        let found: SocketAddr =
            found.with_context(|| format!("{}: the host name has no address", place()))?;
        for _ in 0..args.count {
            let began = Instant::now();
            let connected = TcpStream::connect_timeout(&found, PATIENCE).with_context(place)?;
            let took = began.elapsed();
            drop(connected);
            bar.inc(1);
            output::print(&format!("{} {name} {:.3}", args.region, took.as_secs_f64() * 1e3))?;
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Makes the topology of the measurements in these files, given by name and content.
fn join(name: &str, files: &[(String, String)]) -> anyhow::Result<String> {
    let mut measured: OrdMap<(String, String), Vec<f64>> = OrdMap::new();
    for (file, text) in files {
        for (number, line) in (1..).zip(text.lines()) {
            let words: Vec<&str> = line.split_whitespace().collect();
            if words.first().is_none_or(|first| first.starts_with('#')) {
                continue;
            }
            let [from, to, ms] = words.as_slice() else {
                bail!("{file}:{number}: {line:?} is not a measurement; use FROM TO MILLISECONDS");
            };
            let ms: f64 = match ms.parse() {
                Ok(ms) if (0.0..=60_000.0).contains(&ms) => ms,
                Ok(_) | Err(_) => bail!(
                    "{file}:{number}: {ms:?} is not a time; use a number of milliseconds from 0 to 60000"
                ),
            };
            let mut pair = [*from, *to].map(region);
            pair.sort();
            let [Ok(from), Ok(to)] = pair else {
                bail!("{file}:{number}: a region name may contain only letters, digits, - and _");
            };
            measured.entry((from, to)).or_default().push(ms);
        }
    }
    let regions: OrdSet<&String> = measured.keys().flat_map(|(from, to)| [from, to]).collect();
    let regions: Vec<&String> = regions.into_iter().collect();
    ensure!(regions.len() > 1, "a topology needs measurements between at least two regions");
    let local: Vec<f64> = measured
        .iter()
        .filter(|((from, to), _)| from == to)
        .flat_map(|(_, all)| all.iter().copied())
        .collect();
    let local = if local.is_empty() { LOCAL_MS } else { median(local) };
    let quoted = |name: &str| toml::Value::from(name).to_string();
    let names: Vec<String> = regions.iter().map(|name| quoted(name)).collect();
    let mut text = format!(
        "name = {}\nsource = \"measured: the median of connections in both directions\"\nlocal_rtt_ms = {local:.3}\n\
         regions = [{}]\n\n[rtt_ms]\n",
        quoted(name),
        names.join(", ")
    );
    let (mut rest, mut missing) = (regions.as_slice(), Vec::new());
    while let Some((from, others)) = rest.split_first() {
        let mut row = Vec::new();
        for to in others {
            match measured.get(&((*from).clone(), (*to).clone())) {
                Some(all) => row.push(format!("{} = {:.3}", quoted(to), median(all.clone()))),
                None => missing.push(format!("{from} and {to}")),
            }
        }
        if !row.is_empty() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{} = {{ {} }}", quoted(from), row.join(", "));
        }
        rest = others;
    }
    ensure!(missing.is_empty(), "no measurement between {}; measure them too", missing.join(", "));
    // The printed topology must be valid.
    Topology::parse(&text).context("the topology of these measurements")?;
    Ok(text)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_of_both_directions_become_a_topology() {
        let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        let files = [
            file(
                "va",
                "# from Virginia\nVA WA 67.2\nVA WA 66.9\nVA WA 90\nVA SG 214\nVA VA 0.3\n\n",
            ),
            file("wa", "WA VA 67.0\nWA SG 163.5\nWA VA 67.1\n"),
        ];
        let map = Topology::parse(&join("ours", &files).unwrap()).unwrap();
        let at = |name: &str| map.region_named(name).unwrap();
        let ms = |a: &str, b: &str| map.rtt(at(a), at(b)).as_secs_f64() * 1e3;
        assert_eq!((map.name.as_str(), map.len()), ("ours", 3));
        assert!((ms("VA", "WA") - 67.1).abs() < 1e-6 && (ms("SG", "VA") - 214.0).abs() < 1e-6);
        assert!((ms("VA", "VA") - 0.3).abs() < 1e-6);

        for (text, expected) in [
            ("VA WA 1\nSG LA 2\n", "no measurement between LA and VA"),
            ("VA WA", "bad:1: \"VA WA\" is not a measurement"),
            ("VA WA 1\nVA WA fast\n", "bad:2: \"fast\" is not a time"),
            ("VA W/A 1\n", "bad:1: a region name"),
            ("VA VA 1\n", "at least two regions"),
        ] {
            let error = join("ours", &[file("bad", text)]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
