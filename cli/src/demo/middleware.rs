//! `demo --middleware`: one database over private PostgreSQL and MariaDB servers that are as far
//! apart as four cities. Clients move money between the servers, a server and the proxy are killed,
//! and at the end the money is counted.

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use orthodrome_core::Rng;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::nanos;
use orthodrome_eval::metrics::{Samples, Summary};
use orthodrome_middleware::Dialect;
use orthodrome_middleware::local::{Client, LocalServer, Login, Refused};
use serde::Serialize;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use crate::load::latency_table;
use crate::private::{self, PLACES, Process, ProxyFile, enter};
use crate::style::Style;
use crate::{Status, output};

/// Which server is killed.
const VICTIM: usize = 1;
/// Accounts at each server, with [`BALANCE`] each.
const ACCOUNTS: usize = 250;
const BALANCE: usize = 1_000;
/// The longest time that branches may stay prepared at the end.
const SETTLE: Duration = Duration::from_secs(30);

/// The options of the demonstration.
pub struct Wish<'a> {
    pub seconds: u64,
    pub clients: u32,
    pub no_fault: bool,
    pub json: bool,
    pub dir: &'a Path,
}

/// The result that `--json` prints.
#[derive(Serialize)]
struct Printed {
    sources: Vec<String>,
    /// Latencies in milliseconds of transfers, by where the two accounts are.
    latency_ms: OrdMap<String, Summary>,
    committed: u64,
    /// Transfers that had no effect, and whose client knows that.
    failed: u64,
    /// Transfers whose connection broke before the answer.
    unknown: u64,
    /// The killed processes, and the longest time without a commit after each, in milliseconds.
    killed: Vec<Killed>,
    /// Time from the last transfer until no branch was prepared anywhere, in milliseconds.
    settled_ms: f64,
    total_ok: bool,
    total: String,
    seconds: f64,
    data: String,
    measured: bool,
    commit: &'static str,
}

#[derive(Serialize, Clone)]
struct Killed {
    what: String,
    dead_ms: f64,
    gap_ms: f64,
}

#[derive(Default)]
struct Tally {
    latencies: OrdMap<String, Samples>,
    committed: u64,
    failed: u64,
    unknown: u64,
    last: Option<Instant>,
    /// The longest time without a commit since it was last read.
    gap: Duration,
}

impl Tally {
    fn commit(&mut self, what: &str, took: Duration) {
        let now = Instant::now();
        let since = self.last.map_or(Duration::ZERO, |last| now.duration_since(last));
        (self.gap, self.last) = (self.gap.max(since), Some(now));
        self.committed += 1;
        self.latencies.entry(what.to_owned()).or_default().record(nanos(took));
    }

    /// Summaries of latencies, by kind and of all transfers.
    fn latency_ms(&self) -> OrdMap<String, Summary> {
        let one = |(what, samples): (&String, &Samples)| (what.clone(), Summary::of_nanos(samples));
        let mut latency_ms: OrdMap<String, Summary> = self.latencies.iter().map(one).collect();
        let mut all = Samples::default();
        self.latencies.values().for_each(|samples| all.merge(samples));
        latency_ms.insert("all".into(), Summary::of_nanos(&all));
        latency_ms
    }
}

fn locked(tally: &Mutex<Tally>) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the demonstration.
///
/// # Errors
/// It could not run.
pub fn run(wish: &Wish<'_>) -> anyhow::Result<Status> {
    let kinds = kinds()?;
    let style = Style::new(std::io::stderr().is_terminal());
    let named: Vec<String> = kinds
        .iter()
        .zip(PLACES)
        .map(|(kind, (place, rtt))| format!("{place} ({kind}, {rtt} ms)"))
        .collect();
    note!("Starting four private servers: {}.", named.join(", "));
    let mut servers = private::start(&kinds, wish.dir)?;
    let file = ProxyFile::new("geotp", &[], "", ("accounts", ACCOUNTS))?;
    let mut proxy = Process::start("proxy", wish.dir, "proxy", &file.text(&servers))?;
    let login = file.login(Dialect::PostgreSql);
    let runtime = Runtime::new().context("cannot start the runtime")?;
    let printed = runtime.block_on(async {
        fill(&login).await?;
        show(wish, &login, &mut servers, &mut proxy, &named, style).await
    })?;
    runtime.shutdown_background();
    if wish.json {
        output::print_json(&printed)?;
    } else {
        output::print(&summary(&printed))?;
    }
    Ok(if printed.total_ok { Status::Passed } else { Status::Failed })
}

/// The kind of each server: alternating, if both kinds are installed.
fn kinds() -> anyhow::Result<[Dialect; 4]> {
    let (postgres, maria) = (Dialect::PostgreSql, Dialect::MariaDb);
    match (LocalServer::check(postgres), LocalServer::check(maria)) {
        (Ok(()), Ok(())) => Ok([postgres, maria, postgres, maria]),
        (Ok(()), Err(other)) => {
            note!("All servers are PostgreSQL: {other}");
            Ok([postgres; 4])
        }
        (Err(other), Ok(())) => {
            note!("All servers are MariaDB: {other}");
            Ok([maria; 4])
        }
        (Err(_), Err(_)) => bail!(
            "--middleware: needs PostgreSQL 15 or later, or MariaDB, or both on this machine; install them as root: \
             apt-get install postgresql mariadb-server"
        ),
    }
}

async fn fill(login: &Login<'_>) -> anyhow::Result<()> {
    let mut client = enter(login).await?;
    client.text("CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL)").await?;
    let row = |id: usize| format!("({id}, {BALANCE})");
    let rows: Vec<String> = (0..ACCOUNTS * PLACES.len()).map(row).collect();
    client.text(&format!("INSERT INTO accounts (id, balance) VALUES {}", rows.join(", "))).await?;
    Ok(())
}

/// One client: moves money until the demonstration ends.
async fn call(
    login: Login<'static>,
    number: u64,
    tally: Arc<Mutex<Tally>>,
    ends: CancellationToken,
) {
    let mut rng = Rng::stream(1, "demo", number);
    let mut client: Option<Client> = None;
    while !ends.is_cancelled() {
        let Some(open) = client.as_mut() else {
            client = Client::enter(&login).await.ok();
            if client.is_none() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            continue;
        };
        // Half of all transfers stay within one server.
        let from = rng.below(PLACES.len() as u64) as usize;
        let to = if rng.below(2) == 0 { from } else { rng.below(PLACES.len() as u64) as usize };
        let account =
            |place: usize, rng: &mut Rng| place * ACCOUNTS + rng.below(ACCOUNTS as u64) as usize;
        let (a, b) = (account(from, &mut rng), account(to, &mut rng));
        let amount = 1 + rng.below(9);
        let change = |sign, id| {
            format!("UPDATE accounts SET balance = balance {sign} {amount} WHERE id = {id}")
        };
        let text = format!("BEGIN; {}; {}; COMMIT", change('-', a), change('+', b));
        let begun = Instant::now();
        match open.text(&text).await {
            Ok(_) => {
                let far = from.max(to);
                let place = PLACES.get(far).map_or("", |(place, _)| place);
                let what = if from == to {
                    format!("within {place}")
                } else {
                    format!("between {place} and nearer")
                };
                locked(&tally).commit(&what, begun.elapsed());
            }
            Err(Refused::Fault(fault)) if fault.sqlstate == "08007" => locked(&tally).unknown += 1,
            Err(Refused::Fault(_)) => {
                locked(&tally).failed += 1;
                // A failed transaction block stays open until `ROLLBACK`.
                if open.text("ROLLBACK").await.is_err() {
                    client = None;
                }
            }
            Err(Refused::Broken(_)) => {
                locked(&tally).unknown += 1;
                client = None;
            }
        }
    }
}

/// Runs clients, stops and restarts a server and the proxy, and counts.
async fn show(
    wish: &Wish<'_>,
    login: &Login<'static>,
    servers: &mut [LocalServer],
    proxy: &mut Process,
    named: &[String],
    style: Style,
) -> anyhow::Result<Printed> {
    let tally: Arc<Mutex<Tally>> = Arc::default();
    let ends = CancellationToken::new();
    let calls: Vec<_> = (0..u64::from(wish.clients))
        .map(|number| tokio::spawn(call(*login, number, Arc::clone(&tally), ends.clone())))
        .collect();
    let begun = Instant::now();
    let view = View { tally: &tally, begun, seconds: wish.seconds, style };
    let sixth = Duration::from_secs(wish.seconds) / 6;
    let mut killed = Vec::new();
    if wish.no_fault {
        view.follow(sixth * 6, "all servers up").await;
    } else if view.follow(sixth * 2, "all servers up").await {
        killed = kill_each(&view, servers, proxy, named, sixth).await?;
    }
    ends.cancel();
    note!("{}", style.dim("Waiting for pending transactions, then counting the money."));
    let seconds = begun.elapsed().as_secs_f64();
    for call in calls {
        call.await.context("a client of the demonstration panicked")?;
    }
    let last = Instant::now();
    let is_settled = settled(servers).await;
    let settled_ms = millis(last.elapsed());
    let total = total(login).await?;
    let accounts = ACCOUNTS * PLACES.len();
    let expected = [accounts.to_string(), (accounts * BALANCE).to_string()];
    let tally = locked(&tally);
    Ok(Printed {
        sources: named.to_vec(),
        latency_ms: tally.latency_ms(),
        committed: tally.committed,
        failed: tally.failed,
        unknown: tally.unknown,
        killed,
        settled_ms,
        total_ok: is_settled && total == expected,
        total: total.join(" accounts hold "),
        seconds,
        data: wish.dir.display().to_string(),
        measured: true,
        commit: output::COMMIT,
    })
}

/// Kills a server and restarts it, then the proxy. Ends early if the user interrupts it.
async fn kill_each(
    view: &View<'_>,
    servers: &mut [LocalServer],
    proxy: &mut Process,
    named: &[String],
    sixth: Duration,
) -> anyhow::Result<Vec<Killed>> {
    let (tally, style) = (view.tally, view.style);
    let name = named.get(VICTIM).cloned().unwrap_or_default();
    locked(tally).gap = Duration::ZERO;
    let Some(server) = servers.get_mut(VICTIM) else { return Ok(Vec::new()) };
    server.kill();
    let dead = Instant::now();
    let goes_on = view.follow(sixth, &style.error(&format!("{name} is DOWN"))).await;
    server.restart()?;
    let dead_ms = millis(dead.elapsed());
    if !goes_on || !view.follow(sixth, &style.good(&format!("{name} is back"))).await {
        return Ok(Vec::new());
    }
    let gap_ms = millis(std::mem::take(&mut locked(tally).gap));
    let of_server = Killed { what: name, dead_ms, gap_ms };
    proxy.kill();
    let dead = Instant::now();
    note!("{}", style.error("the proxy is DOWN"));
    proxy.restart()?;
    let dead_ms = millis(dead.elapsed());
    view.follow(sixth * 2, &style.good("the proxy is back")).await;
    let gap_ms = millis(locked(tally).gap);
    Ok(vec![of_server, Killed { what: "the proxy".into(), dead_ms, gap_ms }])
}

/// The number of accounts, and the money in all of them.
async fn total(login: &Login<'_>) -> anyhow::Result<Vec<String>> {
    let mut client = enter(login).await?;
    let counted = client.text("SELECT count(*), sum(balance) FROM accounts").await?;
    let cells = counted.into_iter().flat_map(|answer| answer.rows).flatten().flatten();
    Ok(cells.map(|cell| String::from_utf8_lossy(&cell).into_owned()).collect())
}

fn millis(span: Duration) -> f64 {
    (span.as_secs_f64() * 1e4).round() / 10.0
}

/// Waits until no branch is prepared anywhere; false if that takes too long.
async fn settled(servers: &[LocalServer]) -> bool {
    let deadline = Instant::now() + SETTLE;
    for server in servers {
        let text = match server.kind {
            Dialect::PostgreSql => "SELECT gid FROM pg_prepared_xacts",
            Dialect::MariaDb => "XA RECOVER",
        };
        loop {
            let is_clean = match Client::enter(&server.login()).await {
                Ok(mut client) => match client.text(text).await {
                    Ok(answers) => answers.iter().all(|answer| answer.rows.is_empty()),
                    Err(_) => false,
                },
                Err(_) => false,
            };
            if is_clean {
                break;
            }
            if Instant::now() > deadline {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    true
}

/// Prints one line each second about the state of the run.
struct View<'a> {
    tally: &'a Mutex<Tally>,
    begun: Instant,
    seconds: u64,
    style: Style,
}

impl View<'_> {
    /// Shows the state of the run for a time; false if Ctrl-C came first.
    async fn follow(&self, time: Duration, headline: &str) -> bool {
        let end = tokio::time::sleep(time);
        tokio::pin!(end);
        let interrupted = tokio::signal::ctrl_c();
        tokio::pin!(interrupted);
        let mut seconds = tokio::time::interval(Duration::from_secs(1));
        let mut before = locked(self.tally).committed;
        seconds.tick().await;
        loop {
            tokio::select! {
                () = &mut end => return true,
                _ = &mut interrupted => return false,
                _ = seconds.tick() => {
                    let tally = locked(self.tally);
                    let rate = tally.committed - before;
                    before = tally.committed;
                    let passed = self.begun.elapsed().as_secs_f64();
                    let lost = format!("{} failed, {} unknown", tally.failed, tally.unknown);
                    note!(
                        "{passed:>3.0}/{} s  {rate:>5} commits/s  {}  {headline}",
                        self.seconds,
                        self.style.dim(&format!("{lost:<24}"))
                    );
                }
            }
        }
    }
}

/// The summary as readable text.
fn summary(printed: &Printed) -> String {
    let style = Style::new(std::io::stdout().is_terminal());
    let mut text = String::new();
    let tick = |ok: bool| if ok { style.good("✔") } else { style.error("✘") };
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "\n{} over {} (servers on this machine, emulated round-trip times; measured)",
        style.bold("geotp"),
        printed.sources.join(", ")
    );
    let order = |name: &String| {
        let place = PLACES.iter().position(|(place, _)| name.contains(place));
        (place.unwrap_or(PLACES.len()), !name.starts_with("within"))
    };
    let mut rows: Vec<_> = printed.latency_ms.iter().collect();
    rows.sort_by_key(|(name, _)| order(name));
    let _ = writeln!(text, "{}", latency_table(rows.into_iter()));
    for Killed { what, dead_ms, gap_ms } in &printed.killed {
        let _ = writeln!(
            text,
            "  {what}: killed, restarted after {dead_ms:.0} ms; longest time without a commit: {gap_ms:.0} ms"
        );
    }
    let _ = writeln!(
        text,
        "  {} committed, {} aborted, {} unknown (the connection broke)",
        output::count(printed.committed),
        output::count(printed.failed),
        output::count(printed.unknown)
    );
    let _ = writeln!(
        text,
        "{} Sum over all accounts: {}",
        tick(printed.total_ok),
        if printed.total_ok {
            format!(
                "correct, no money was created or lost; every branch ended within {:.0} ms",
                printed.settled_ms
            )
        } else {
            format!("WRONG ({}), or a branch is still prepared", printed.total)
        }
    );
    let _ = writeln!(text, "\n  data     {}", printed.data);
    text
}
