//! `measure --overhead`: latency of single statements on loopback, with and without the proxy.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use futures_util::future::try_join_all;
use orthodrome_core::Rng;
use orthodrome_core::time::nanos;
use orthodrome_eval::metrics::{Samples, Summary};
use orthodrome_middleware::Dialect;
use orthodrome_middleware::local::{LocalServer, Login, Refused};
use serde::Serialize;

use super::{Args, fill, round};
use crate::output;
use crate::private::{self, Process, ProxyFile, enter};

/// The result that `--overhead --json` prints.
#[derive(Serialize)]
pub struct Overhead {
    measured: bool,
    commit: &'static str,
    seconds: u64,
    statements: Vec<Statement>,
}

/// The latency of a statement, directly and through the proxy.
#[derive(Serialize)]
struct Statement {
    source: &'static str,
    statement: &'static str,
    /// The field has an older name in the JSON.
    #[serde(rename = "callers")]
    clients: u32,
    /// Directly at the server, in milliseconds.
    server_ms: Summary,
    /// Through the proxy, in milliseconds.
    proxy_ms: Summary,
    server_a_second: f64,
    proxy_a_second: f64,
}

/// The query batches, by name; `{row}` stands for the number of a row.
const BATCHES: [(&str, &str); 3] = [
    ("read by key", "SELECT field FROM usertable WHERE id = {row}"),
    ("update by key", "UPDATE usertable SET field = 'changed' WHERE id = {row}"),
    (
        "BEGIN, read, update, COMMIT in one batch",
        "BEGIN; SELECT field FROM usertable WHERE id = {row}; UPDATE usertable SET field = 'changed' WHERE id = {row}; COMMIT",
    ),
];

/// Measures each statement at a server and through a proxy in front of it, in turn.
pub async fn measure(args: &Args, dir: &Path) -> anyhow::Result<Overhead> {
    let mut statements = Vec::new();
    for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
        if let Err(missing) = LocalServer::check(kind) {
            note!("{kind} is not measured: {missing}");
            continue;
        }
        let dir = dir.join(private::kind_name(kind));
        std::fs::create_dir_all(&dir)?;
        let servers = private::start(&[kind], &dir)?;
        fill(args, &servers).await?;
        let file = ProxyFile::new("geotp", &[], "", ("usertable", args.rows as usize))?;
        let _proxy = Process::start("proxy", &dir, "proxy", &file.text(&servers))?;
        let server = servers.first().context("no server was started")?;
        for (name, batch) in BATCHES {
            for clients in [1, 8] {
                let mut ends = Vec::new();
                for login in [server.login(), file.login(kind)] {
                    ends.push(repeat(args, login, batch, clients).await?);
                }
                let [(server_ms, server_a_second), (proxy_ms, proxy_a_second)] =
                    <[_; 2]>::try_from(ends)
                        .map_err(|_| anyhow!("there must be two measurements"))?;
                let source = private::kind_name(kind);
                statements.push(Statement {
                    source,
                    statement: name,
                    clients,
                    server_ms,
                    proxy_ms,
                    server_a_second,
                    proxy_a_second,
                });
            }
        }
    }
    Ok(Overhead { measured: true, commit: output::COMMIT, seconds: args.seconds, statements })
}

/// How long conflicts of a client's first query batch are ignored; a later one ends the measurement.
const WARM_UP: Duration = Duration::from_secs(30);

/// Repeats one query batch on uniformly drawn rows; each client has its own rows. Aborted batches
/// are not counted.
async fn repeat(
    args: &Args,
    login: Login<'static>,
    batch: &'static str,
    clients: u32,
) -> anyhow::Result<(Summary, f64)> {
    let window = Duration::from_secs(args.seconds) / 8;
    let rows = u64::from(args.rows / clients).max(1);
    let calls = (0..clients).map(|number| async move {
        let mut client = enter(&login).await?;
        // A proxy that has just started runs no statements for a while. That is not a cost of the
        // statement.
        let first = batch.replace("{row}", &(u64::from(number) * rows).to_string());
        let begun = Instant::now();
        loop {
            match client.text(&first).await {
                Ok(_) => break,
                // Other clients start at the same moment and may conflict.
                Err(Refused::Fault(fault))
                    if fault.sqlstate == "40001" && begun.elapsed() < WARM_UP =>
                {
                    client.text("ROLLBACK").await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        let mut rng = Rng::stream(1, "overhead", u64::from(number));
        let (mut samples, begun) = (Samples::default(), Instant::now());
        while begun.elapsed() < window {
            let row = u64::from(number) * rows + rng.below(rows);
            let batch = batch.replace("{row}", &row.to_string());
            let sent = Instant::now();
            match client.text(&batch).await {
                Ok(_) => samples.record(nanos(sent.elapsed())),
                // Servers also lock gaps between rows, so clients can conflict although no two of
                // them share a row.
                Err(Refused::Fault(fault)) if fault.sqlstate == "40001" => {
                    client.text("ROLLBACK").await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        anyhow::Ok(samples)
    });
    let mut all = Samples::default();
    for samples in try_join_all(calls).await? {
        all.merge(&samples);
    }
    Ok((Summary::of_nanos(&all), round(all.len() as f64 / window.as_secs_f64())))
}

pub fn table(found: &Overhead) -> String {
    let figure = |value: f64| format!("{value:.3}");
    let rows = found.statements.iter().map(|one| {
        [
            format!("{}, {}", one.source, one.statement),
            one.clients.to_string(),
            figure(one.server_ms.p50),
            figure(one.proxy_ms.p50),
            figure(one.server_ms.p99),
            figure(one.proxy_ms.p99),
            format!("{:.0}", one.server_a_second),
            format!("{:.0}", one.proxy_a_second),
        ]
    });
    let header = [
        "statement",
        "clients",
        "p50 ms",
        "via proxy",
        "p99 ms",
        "via proxy",
        "per second",
        "via proxy",
    ];
    format!(
        "Measured on this machine, on loopback; commit {}\n\n{}\n",
        found.commit,
        output::table(&header, rows).trim_fmt()
    )
}
