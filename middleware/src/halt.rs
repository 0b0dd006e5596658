//! Steps at which a test stops the process, so that it can kill a party exactly there.
//!
//! `ORTHODROME_STOP_AT=commit:2` stops the whole process, as SIGSTOP does, before it sends the
//! second order to commit. The test then kills this process or another one, and continues it if
//! wanted. So one hook serves for the death of every party, sources included. Without the variable
//! nothing is counted.

use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

use orthodrome_geotp::contract::{AgentEffect, Effect, FromAgent, Record, ToAgent, ToSource};

use super::driver::Sql;

struct Wanted {
    step: String,
    /// Number of times that the step is still passed.
    left: u32,
}

/// The value of the variable; empty after the process has stopped once.
static WANTED: OnceLock<Option<Mutex<Option<Wanted>>>> = OnceLock::new();

fn wanted() -> Option<&'static Mutex<Option<Wanted>>> {
    let read = || {
        let text = std::env::var("ORTHODROME_STOP_AT").ok()?;
        let (step, count) = text.split_once(':').unwrap_or((&text, "1"));
        Some(Mutex::new(Some(Wanted { step: step.to_owned(), left: count.parse().ok()? })))
    };
    WANTED.get_or_init(read).as_ref()
}

/// Stops the process if this is the step.
fn reached(step: &str) {
    let Some(place) = wanted() else { return };
    let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(wanted) = place.as_mut().filter(|wanted| wanted.step == step) else { return };
    wanted.left = wanted.left.saturating_sub(1);
    if wanted.left == 0 {
        *place = None;
        // The signal goes to this very thread. Otherwise the kernel could choose another thread,
        // and this one would continue until that one gets a processor.
        let thread = std::fs::read_link("/proc/thread-self").unwrap_or_default();
        let thread = thread.file_name().unwrap_or_default();
        let stopped = Command::new("sh").args(["-c", "kill -STOP \"$0\""]).arg(thread).status();
        tracing::warn!(step, ?stopped, "went on after a stop that a test asked for");
    }
}

/// Called before an effect of a middleware is carried out.
pub(crate) fn before(effect: &Effect<Sql>) {
    if wanted().is_none() {
        return;
    }
    match effect {
        Effect::Send { msg: ToAgent::Execute { .. } | ToAgent::After { .. }, .. } => {
            reached("execute")
        }
        Effect::Send { msg: ToAgent::Prepare { .. }, .. } => reached("prepare"),
        Effect::Send { msg: ToAgent::Commit { one_phase: false, .. }, .. } => reached("commit"),
        Effect::Persist { record: Record::Commit { .. }, .. } => reached("decide"),
        Effect::Persist { record: Record::Ended(_), .. } => reached("forget"),
        Effect::Finished { .. } => reached("tell"),
        _ => {}
    }
}

/// Called before an effect of an agent is carried out.
pub(crate) fn before_agents(effect: &AgentEffect<Sql>) {
    if wanted().is_none() {
        return;
    }
    match effect {
        AgentEffect::Source(ToSource::Run { .. }) => reached("run"),
        AgentEffect::Source(ToSource::CommitPrepared { .. }) => reached("end"),
        AgentEffect::Send { msg: FromAgent::Answered { .. }, .. } => reached("answer"),
        AgentEffect::Send { msg: FromAgent::Prepared { .. }, .. } => reached("vote"),
        AgentEffect::Send { msg: FromAgent::Committed { .. }, .. } => reached("acknowledge"),
        _ => {}
    }
}
