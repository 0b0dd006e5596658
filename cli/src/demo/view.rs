//! The live view of the demonstration.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::time::Duration;

use orthodrome_core::RegionId;
use orthodrome_core::txn::Priority;
use orthodrome_eval::metrics::Summary;

use crate::load::driver::Shared;
use crate::load::results::Watched;
use crate::output;
use crate::style::Style;

/// Interval between two drawings of the table.
const REDRAW: Duration = Duration::from_millis(250);
const REDRAWS_PER_SECOND: u32 = 4;
/// Width of the bar that shows how much time has passed.
const BAR: u64 = 30;

/// The phase of the demonstration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// All regions run.
    Calm,
    /// This one is dead.
    Outage(RegionId),
    /// This region is back; with the observations from the time when it was dead.
    Back(RegionId, Watched),
}

/// A table that is redrawn on a terminal, or one line each second if there is no terminal.
pub struct View {
    shared: Arc<Shared>,
    names: Vec<String>,
    seconds: u64,
    style: Style,
    is_tty: bool,
    drawn: usize,
    ticks: u32,
    is_interrupted: bool,
}

impl View {
    /// A view of the clients' results.
    pub fn new(shared: Arc<Shared>, names: Vec<String>, seconds: u64, style: Style) -> Self {
        let is_tty = std::io::stderr().is_terminal();
        Self { shared, names, seconds, style, is_tty, drawn: 0, ticks: 0, is_interrupted: false }
    }

    /// The state that the clients share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Shows the state of the run for a time; false if Ctrl-C came first.
    pub async fn follow(&mut self, time: Duration, phase: Phase) -> bool {
        if self.is_interrupted {
            return false;
        }
        let end = tokio::time::sleep(time);
        tokio::pin!(end);
        let interrupted = tokio::signal::ctrl_c();
        tokio::pin!(interrupted);
        let mut redraws = tokio::time::interval(REDRAW);
        loop {
            tokio::select! {
                () = &mut end => return true,
                _ = &mut interrupted => {
                    self.is_interrupted = true;
                    return false;
                }
                _ = redraws.tick() => self.tick(phase),
            }
        }
    }

    fn tick(&mut self, phase: Phase) {
        if self.is_tty {
            self.draw(phase);
        } else if self.ticks.is_multiple_of(REDRAWS_PER_SECOND) {
            note!("{}", self.line(phase));
        }
        self.ticks += 1;
        if self.ticks.is_multiple_of(REDRAWS_PER_SECOND) {
            self.shared.results().tick();
        }
    }

    /// Ends the live view with a last line.
    pub fn end(&mut self, farewell: &str) {
        note!("{}", self.style.dim(farewell));
    }

    fn headline(&self, phase: Phase) -> String {
        let name = |region| self.shared.region_name(region);
        match phase {
            Phase::Calm => "all regions up".into(),
            Phase::Outage(region) => {
                let seen = self.shared.results().watched();
                let (since, seen) = seen.unwrap_or_default();
                let text = format!(
                    "{} is DOWN for {:.1} s: {} commits in other regions, longest gap {:.0} ms",
                    name(region),
                    since.as_secs_f64(),
                    output::count(seen.committed),
                    seen.longest_silence.as_secs_f64() * 1_000.0
                );
                self.style.error(&text)
            }
            Phase::Back(region, seen) => {
                let text = format!(
                    "{} is back; while it was down: {} commits, longest gap {:.0} ms",
                    name(region),
                    output::count(seen.committed),
                    seen.longest_silence.as_secs_f64() * 1_000.0
                );
                self.style.good(&text)
            }
        }
    }

    /// One line for a log.
    fn line(&self, phase: Phase) -> String {
        let headline = self.headline(phase);
        let results = self.shared.results();
        let (rate, latency) = results.recent(|_, _| true);
        let (_, high) = results.recent(|priority, _| priority > Priority::LOW);
        format!(
            "{:>3.0} s  {rate:>5.0} commits/s  p50 {:>5} ms  p95 {:>5} ms ({} high priority)  p99 {:>5} ms  \
             {headline}",
            self.shared.started.elapsed().as_secs_f64(),
            figure(&latency, latency.p50),
            figure(&latency, latency.p95),
            figure(&high, high.p95),
            figure(&latency, latency.p99),
        )
    }

    fn draw(&mut self, phase: Phase) {
        let text = self.screen(phase);
        let mut stderr = std::io::stderr().lock();
        // Moves to the beginning of the last table and deletes everything below. A failure to write
        // to the terminal is no reason to stop.
        if self.drawn > 0 {
            let _ = write!(stderr, "\x1b[{}A\x1b[J", self.drawn);
        }
        let _ = write!(stderr, "{text}");
        let _ = stderr.flush();
        self.drawn = text.lines().count();
    }

    fn screen(&self, phase: Phase) -> String {
        let mut text = String::new();
        let passed = self.shared.started.elapsed().as_secs_f64().min(self.seconds as f64);
        let filled = (passed / self.seconds.max(1) as f64 * BAR as f64) as u64;
        let bar: String = (0..BAR).map(|at| if at < filled { '█' } else { '░' }).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{bar} {passed:>4.0}/{} s   {}", self.seconds, self.headline(phase));
        let _ = writeln!(text, "{}", self.table(phase));
        text
    }

    fn table(&self, phase: Phase) -> comfy_table::Table {
        let results = self.shared.results();
        let row = |name: &str, state, wanted: &dyn Fn(Priority, RegionId) -> bool| {
            let (rate, latency) = results.recent(wanted);
            Self::row(name.to_owned(), state, rate, latency)
        };
        let totals = [
            row("high priority", "", &|priority, _| priority > Priority::LOW),
            row("low priority", "", &|priority, _| priority == Priority::LOW),
            row("all", "", &|_, _| true),
        ];
        let regions = (0..).map(RegionId).zip(&self.names).map(|(region, name)| {
            let state = match phase {
                Phase::Outage(dead) if dead == region => "✖ down",
                Phase::Back(back, _) if back == region => "↻ back",
                Phase::Calm | Phase::Outage(_) | Phase::Back(..) => "● up",
            };
            row(name, state, &|_, at| at == region)
        });
        let header = ["region", "", "commits/s", "p50 ms", "p95 ms", "p99 ms"];
        output::table(&header, regions.chain(totals))
    }

    fn row(name: String, state: &str, rate: f64, latency: Summary) -> [String; 6] {
        [
            name,
            state.into(),
            format!("{rate:.0}"),
            figure(&latency, latency.p50),
            figure(&latency, latency.p95),
            figure(&latency, latency.p99),
        ]
    }
}

/// A latency of a summary; a dash if the summary is empty.
fn figure(of: &Summary, millis: f64) -> String {
    if of.n == 0 { "–".into() } else { format!("{millis:.0}") }
}
