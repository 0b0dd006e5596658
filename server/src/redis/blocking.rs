//! Blocking commands: `BLPOP`, `BRPOP`, `BLMPOP`, `BLMOVE`, `BRPOPLPUSH`, `BZPOPMIN`, `BZPOPMAX` and
//! `BZMPOP`.
//!
//! Such a command runs at once, unless other clients are blocked on each of its keys. If its keys are
//! empty, its client is blocked, and joins a queue for each key. While a client of this node is in the queue of a key, the node watches that key. When the key
//! changes, the first client of the queue tries again. A client that finds nothing, or leaves a queue, lets
//! the next one try. So a push wakes one client of each node, and clients of one node are served in the order in which
//! they were blocked.
//!
//! A watch shows changes from some moment on. A client looks once more when the watches of all its keys
//! have begun, so it misses nothing. A watch that ends begins again.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use orthodrome_core::Key;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::procedure::redis::number::{Score, integer};
use orthodrome_core::procedure::redis::reply::{Failure, Reply, SYNTAX};
use orthodrome_core::procedure::redis::{KeyName, wrong_arity};
use orthodrome_core::scan::KeyRange;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::connection::Connection;
use super::local::Local;
use super::messages::Status;
use super::request::WORD_BYTES;
use super::run::stored;
use crate::backoff::Backoff;
use crate::scan::Batches;

/// Takes the first or last element of the first list that has one. With a second argument, keys of
/// another type are skipped: a client that is blocked already stays blocked, as in Redis.
const POP: &str = "for _, key in ipairs(KEYS) do \
     local element = redis.pcall(ARGV[1], key) \
     if type(element) == 'table' then \
     if not ARGV[2] then return element end \
     elseif element then return {key, element} end \
     end return false";
/// Takes the member with the lowest or highest score of the first sorted set that has one. The second
/// argument is that of [`POP`].
const POP_SCORED: &str = "for _, key in ipairs(KEYS) do \
     local pair = redis.pcall(ARGV[1], key) \
     if pair.err then \
     if not ARGV[2] then return pair end \
     elseif #pair > 0 then return {key, pair[1], pair[2]} end \
     end return false";

/// Takes elements of the first key that has any: `LMPOP` or `ZMPOP`, which end they take from, how many
/// at most, and the last argument of [`POP`].
const POP_SEVERAL: &str = "for _, key in ipairs(KEYS) do \
     local found = redis.pcall(ARGV[1], 1, key, ARGV[2], 'COUNT', ARGV[3]) \
     if found and found.err then \
     if not ARGV[4] then return found end \
     elseif found then return found end \
     end return false";

const NO_KEYS: Failure = Failure::new("ERR numkeys should be greater than 0");
const NO_COUNT: Failure = Failure::new("ERR count should be greater than 0");
const NOT_A_TIME: Failure = Failure::new("ERR timeout is not a float or out of range");
const NEGATIVE: Failure = Failure::new("ERR timeout is negative");

/// The first and the longest pause before a watch that has ended begins again.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The longest time-out, in seconds, as in Redis: its milliseconds are a signed integer of 64 bits.
const TIMEOUT_MAX: f64 = 9_223_372_036_854_775.0;
/// What a key on which a client is blocked counts besides its name.
const KEY_BYTES: usize = 256;

/// A blocking command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Blocking {
    /// Takes the first element of one of several lists.
    First,
    /// Takes the last element.
    Last,
    /// Moves an element from one end of a list to one end of another.
    Move,
    /// Moves the last element of a list to the front of another.
    MoveLast,
    /// Takes the member with the lowest score of one of several sorted sets.
    Lowest,
    /// Takes the member with the highest score.
    Highest,
    /// Takes several elements of one of several lists.
    Elements,
    /// Takes several members of one of several sorted sets.
    Members,
}

/// A blocked client.
#[derive(Debug, Default)]
struct Waiter {
    /// It is its turn to try.
    turn: Notify,
}

/// The clients that are blocked on one key, in order.
#[derive(Debug)]
struct Queue {
    waiters: VecDeque<Arc<Waiter>>,
    /// Of the watch of the key.
    status: watch::Receiver<Status>,
    /// Tells this queue from an earlier one of the same key.
    round: u64,
    _end: DropGuard,
}

impl Queue {
    fn wake(&self) {
        if let Some(first) = self.waiters.front() {
            first.turn.notify_one();
        }
    }
}

/// The queues of a node.
#[derive(Debug, Default)]
pub(super) struct Queues {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    by_key: OrdMap<KeyName, Queue>,
    /// The round of the newest queue.
    round: u64,
}

impl Queues {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code that holds the lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether clients are blocked on each of these keys: all were empty a moment ago.
    fn are_empty(&self, keys: &[KeyName]) -> bool {
        let state = self.state();
        keys.iter().all(|key| state.by_key.contains_key(key))
    }

    /// Adds a client to the queue of `key`. Returns the status of the watch of that key, which begins with
    /// the queue.
    fn join(
        self: &Arc<Self>,
        key: &KeyName,
        waiter: &Arc<Waiter>,
        watch: impl FnOnce(KeyRange) -> Result<Batches, Failure>,
    ) -> Result<watch::Receiver<Status>, Failure> {
        let mut state = self.state();
        if let Some(queue) = state.by_key.get_mut(key) {
            queue.waiters.push_back(Arc::clone(waiter));
            return Ok(queue.status.clone());
        }
        let batches = watch(alone(key))?;
        let (status, receiver) = watch::channel(Status::Begins);
        let end = CancellationToken::new();
        state.round += 1;
        let round = state.round;
        let queue = Queue {
            waiters: VecDeque::from([Arc::clone(waiter)]),
            status: receiver.clone(),
            round,
            _end: end.clone().drop_guard(),
        };
        state.by_key.insert(key.clone(), queue);
        tokio::spawn(Arc::clone(self).follow((key.clone(), round), batches, status, end));
        Ok(receiver)
    }

    /// Wakes the client that is in the queue of `key` right behind `waiter`.
    fn wake_after(&self, key: &KeyName, waiter: &Arc<Waiter>) {
        let state = self.state();
        let Some(queue) = state.by_key.get(key) else { return };
        let behind = queue.waiters.iter().skip_while(|other| !Arc::ptr_eq(other, waiter)).nth(1);
        if let Some(behind) = behind {
            behind.turn.notify_one();
        }
    }

    /// Removes a client from the queue of `key`. The next one tries, because this one may have been woken.
    fn leave(&self, key: &KeyName, waiter: &Arc<Waiter>) {
        let mut state = self.state();
        let Some(queue) = state.by_key.get_mut(key) else { return };
        queue.waiters.retain(|other| !Arc::ptr_eq(other, waiter));
        if queue.waiters.is_empty() {
            state.by_key.remove(key);
        } else {
            queue.wake();
        }
    }

    /// Wakes the first client whenever the key has a new value, until the queue or the watch ends.
    async fn follow(
        self: Arc<Self>,
        (key, round): (KeyName, u64),
        mut batches: Batches,
        status: watch::Sender<Status>,
        end: CancellationToken,
    ) {
        let failed = loop {
            let next = tokio::select! {
                () = end.cancelled() => return,
                next = batches.recv() => next,
            };
            match next {
                Some(Ok(batch)) => {
                    Status::run(&status);
                    if batch.changes.iter().any(|change| change.value.is_some())
                        && let Some(queue) = self.state().by_key.get(&key)
                        && queue.round == round
                    {
                        queue.wake();
                    }
                }
                Some(Err(failed)) => break failed.to_string(),
                None => break "it ended".to_owned(),
            }
        };
        tracing::debug!(%failed, "the watch of a key on which clients are blocked ended");
        let mut state = self.state();
        if state.by_key.get(&key).is_some_and(|queue| queue.round == round) {
            state.by_key.remove(&key);
        }
        drop(state);
        let text = format!("ERR the watch of the key ended, try again: {failed}");
        status.send_replace(Status::Failed(Failure::of(text)));
    }
}

/// The range of one key.
fn alone(key: &KeyName) -> KeyRange {
    let from = stored(key);
    let until = [from.bytes(), &[0]].concat();
    KeyRange { from, until: Some(Key::from(until)) }
}

/// A place in the queues of some keys. Dropping it leaves the queues.
#[derive(Debug)]
struct Place {
    queues: Arc<Queues>,
    waiter: Arc<Waiter>,
    /// Each with the status of its watch.
    keys: Vec<(KeyName, watch::Receiver<Status>)>,
    /// The watches of this number of the keys have begun; one more: the client has looked since.
    begun: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        for (key, _) in &self.keys {
            self.queues.leave(key, &self.waiter);
        }
    }
}

impl Place {
    /// Waits until there is something to do. It can be dropped and called again.
    async fn next(&mut self) -> Next {
        let Self { waiter, keys, begun, .. } = self;
        let all = keys.len();
        let watches = async {
            while let Some((_, status)) = keys.get_mut(*begun) {
                let status = status.wait_for(|status| *status != Status::Begins).await;
                if !status.is_ok_and(|status| *status == Status::Runs) {
                    return Next::Leave;
                }
                *begun += 1;
            }
            if *begun == all {
                *begun += 1;
                return Next::Look;
            }
            let ends = keys.iter_mut().map(|(_, status)| {
                Box::pin(async { drop(status.wait_for(|status| *status != Status::Runs).await) })
            });
            any(ends.collect()).await;
            Next::Leave
        };
        tokio::select! {
            () = waiter.turn.notified() => Next::Try,
            next = watches => next,
        }
    }
}

/// Waits until one of these is ready.
async fn any(mut all: Vec<impl Future<Output = ()> + Unpin>) {
    std::future::poll_fn(|context| {
        let is_ready = all.iter_mut().any(|one| std::pin::Pin::new(one).poll(context).is_ready());
        if is_ready { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// A blocking command that has found nothing yet.
#[derive(Debug)]
pub(super) struct Blocked {
    command: Blocking,
    /// What it runs when it is its turn.
    words: Vec<Bytes>,
    /// Its keys were empty once. From then on a key of another type is no error.
    is_later: bool,
    keys: Vec<KeyName>,
    deadline: Option<Instant>,
    backoff: Backoff,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// It is in the queues of its keys.
    Queued(Place),
    /// A watch has ended. It joins the queues again at this time.
    Pausing(Instant),
}

/// What a blocked client does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// All watches have begun: it looks whether one of its keys exists by now.
    Look,
    /// It tries again.
    Try,
    /// A watch has ended: it leaves the queues, and joins them again after a pause.
    Leave,
    /// The pause is over.
    Join,
    /// Its time-out has passed.
    GiveUp,
}

impl Blocked {
    /// The bytes that it keeps.
    pub(super) fn bytes(&self) -> usize {
        let words = self.words.iter().map(|word| word.len() + WORD_BYTES);
        let keys = self.keys.iter().map(|(_, name)| name.len() * 2 + KEY_BYTES);
        words.chain(keys).sum()
    }

    /// Waits until there is something to do. It can be dropped and called again.
    pub(super) async fn next(&mut self) -> Next {
        let deadline = async {
            match self.deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let next = async {
            match &mut self.stage {
                Stage::Queued(place) => place.next().await,
                Stage::Pausing(until) => {
                    tokio::time::sleep_until(*until).await;
                    Next::Join
                }
            }
        };
        tokio::select! {
            () = deadline => Next::GiveUp,
            next = next => next,
        }
    }

    /// Lets the client behind it in each queue try, which may wait for another type.
    fn pass_on(&self) {
        if let Stage::Queued(place) = &self.stage {
            for (key, _) in &place.keys {
                place.queues.wake_after(key, &place.waiter);
            }
        }
    }

    /// Its keys are empty.
    fn found_nothing(&mut self) {
        let is_script = !matches!(self.command, Blocking::Move | Blocking::MoveLast);
        if !self.is_later && is_script {
            self.words.push(Bytes::from_static(b"later"));
        }
        self.is_later = true;
    }

    fn pause(&mut self) {
        self.stage = Stage::Pausing(Instant::now() + self.backoff.pause());
    }
}

/// The time-out of a command, which is given in seconds; 0 is none.
fn time_out(text: &[u8]) -> Result<Option<Duration>, Failure> {
    let seconds = std::str::from_utf8(text).ok().and_then(|text| text.parse::<f64>().ok());
    let seconds = seconds.filter(|seconds| !seconds.is_nan()).ok_or(NOT_A_TIME)?;
    if !(0.0..=TIMEOUT_MAX).contains(&seconds) {
        return Err(NEGATIVE);
    }
    Ok((seconds > 0.0).then(|| Duration::from_secs_f64(seconds)))
}

impl Blocking {
    fn name(self) -> &'static str {
        Local::Blocking(self).name()
    }

    /// The first and the last word that is a key, and the step between them, as `COMMAND` says it.
    pub(super) fn key_places(self) -> (i64, i64, i64) {
        match self {
            Self::Move | Self::MoveLast => (1, 2, 1),
            Self::First | Self::Last | Self::Lowest | Self::Highest => (1, -2, 1),
            // The keys follow their number.
            Self::Elements | Self::Members => (0, 0, 0),
        }
    }

    /// The time-out, and the other arguments.
    fn split(self, arguments: &[Bytes]) -> Option<(&Bytes, &[Bytes])> {
        match self {
            Self::Elements | Self::Members => arguments.split_first(),
            Self::First
            | Self::Last
            | Self::Move
            | Self::MoveLast
            | Self::Lowest
            | Self::Highest => arguments.split_last(),
        }
    }

    /// What it runs, and the keys on which it blocks.
    fn words(self, arguments: &[Bytes]) -> Result<(Vec<Bytes>, Vec<Bytes>), Failure> {
        let word = |text: &'static str| Bytes::from_static(text.as_bytes());
        let popped = |script, command| {
            let many = Bytes::from(arguments.len().to_string());
            let mut words = vec![word("eval"), word(script), many];
            words.extend_from_slice(arguments);
            words.push(word(command));
            Ok((words, arguments.to_vec()))
        };
        match (self, arguments) {
            (Self::First, [_, ..]) => popped(POP, "lpop"),
            (Self::Last, [_, ..]) => popped(POP, "rpop"),
            (Self::Lowest, [_, ..]) => popped(POP_SCORED, "zpopmin"),
            (Self::Highest, [_, ..]) => popped(POP_SCORED, "zpopmax"),
            (Self::Move, [from, to, end, other]) => {
                let words =
                    vec![word("lmove"), from.clone(), to.clone(), end.clone(), other.clone()];
                Ok((words, vec![from.clone()]))
            }
            (Self::MoveLast, [from, to]) => {
                Ok((vec![word("rpoplpush"), from.clone(), to.clone()], vec![from.clone()]))
            }
            (Self::Elements, _) => several("lmpop", ["left", "right"], arguments),
            (Self::Members, _) => several("zmpop", ["min", "max"], arguments),
            (Self::First | Self::Last | Self::Lowest | Self::Highest, [])
            | (Self::Move | Self::MoveLast, _) => Err(SYNTAX),
        }
    }

    /// The answer, if it found something.
    fn answer(self, found: Reply) -> Option<Reply> {
        match (self, found) {
            (_, Reply::Nil | Reply::NilArray) => None,
            (Self::Lowest | Self::Highest, mut found) => {
                score_is_a_number(&mut found);
                Some(found)
            }
            (Self::Members, Reply::Array(mut items)) => {
                // The name of the key, and pairs of members and scores.
                if let Some(Reply::Array(pairs)) = items.last_mut() {
                    pairs.iter_mut().for_each(score_is_a_number);
                }
                Some(Reply::Array(items))
            }
            (_, found) => Some(found),
        }
    }
}

/// Scores are texts in what a script answers, and numbers in what a command answers.
fn score_is_a_number(pair: &mut Reply) {
    if let Reply::Array(items) = pair
        && let Some(last) = items.last_mut()
        && let Reply::Bulk(text) = last
        && let Some(score) = Score::parse(text)
    {
        *last = Reply::Double(score);
    }
}

/// What `BLMPOP` or `BZMPOP` runs, and its keys: `numkeys key [key …] END [COUNT count]`.
fn several(
    command: &'static str,
    ends: [&'static str; 2],
    arguments: &[Bytes],
) -> Result<(Vec<Bytes>, Vec<Bytes>), Failure> {
    let positive = |text: &Bytes| integer(text).and_then(|it| usize::try_from(it).ok());
    let (many, rest) = arguments.split_first().ok_or(SYNTAX)?;
    let many = positive(many).filter(|many| *many > 0).ok_or(NO_KEYS)?;
    let (keys, rest) = rest.split_at_checked(many).ok_or(SYNTAX)?;
    let (end, rest) = rest.split_first().ok_or(SYNTAX)?;
    let end = ends.into_iter().find(|it| end.eq_ignore_ascii_case(it.as_bytes())).ok_or(SYNTAX)?;
    let count = match rest {
        [] => Bytes::from_static(b"1"),
        [word, count] if word.eq_ignore_ascii_case(b"count") => {
            positive(count).filter(|count| *count > 0).ok_or(NO_COUNT)?;
            count.clone()
        }
        _ => return Err(SYNTAX),
    };
    let word = |text: &'static str| Bytes::from_static(text.as_bytes());
    let mut words = vec![word("eval"), word(POP_SEVERAL), Bytes::from(many.to_string())];
    words.extend_from_slice(keys);
    words.extend([word(command), word(end), count]);
    Ok((words, keys.to_vec()))
}

impl Connection {
    /// Runs a blocking command. Its client is answered, or blocked from now on.
    pub(super) async fn block(&mut self, command: Blocking, arguments: &[Bytes]) {
        let answer = match self.try_to_block(command, arguments).await {
            Ok(None) => return,
            Ok(Some(answer)) => answer,
            Err(failure) => Reply::Error(failure),
        };
        self.unblock(command, &answer);
    }

    async fn try_to_block(
        &mut self,
        command: Blocking,
        arguments: &[Bytes],
    ) -> Result<Option<Reply>, Failure> {
        self.permit(command.name(), true)?;
        let (time, arguments) =
            command.split(arguments).ok_or_else(|| wrong_arity(command.name()))?;
        let (words, names) = command.words(arguments)?;
        let deadline = time_out(time)?.and_then(|span| Instant::now().checked_add(span));
        let mut keys: Vec<KeyName> = names.into_iter().map(|name| (self.database, name)).collect();
        keys.sort();
        keys.dedup();
        // Attempts to take an element conflict with each other. Who comes to empty keys waits in line.
        self.check(&words)?;
        let has_run = !self.runner.queues().are_empty(&keys);
        if has_run && let Some(answer) = command.answer(self.run_alone(&words).await) {
            return Ok(Some(answer));
        }
        let stage = Stage::Queued(self.join_queues(command, &keys)?);
        let backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
        let is_later = false;
        let mut blocked = Blocked { command, words, is_later, keys, deadline, backoff, stage };
        if has_run {
            blocked.found_nothing();
        }
        self.blocked = Some(blocked);
        Ok(None)
    }

    /// Joins the queue of each key.
    fn join_queues(&self, command: Blocking, keys: &[KeyName]) -> Result<Place, Failure> {
        let (queues, waiter) = (Arc::clone(self.runner.queues()), Arc::default());
        let mut place = Place { queues, waiter, keys: Vec::new(), begun: 0 };
        for key in keys {
            let watch = |range| self.begin_watch(command.name(), range);
            let status = place.queues.join(key, &place.waiter, watch)?;
            place.keys.push((key.clone(), status));
        }
        Ok(place)
    }

    /// Does what a blocked client does next.
    pub(super) async fn resume(&mut self, next: Next) {
        let Some(mut blocked) = self.blocked.take() else { return };
        let command = blocked.command;
        match next {
            Next::GiveUp => return self.unblock(command, &Reply::NilArray),
            Next::Look if !self.exists(&blocked.keys).await => {
                // The next watch that ends is not one of those that fail again and again.
                blocked.backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
                blocked.found_nothing();
            }
            Next::Look | Next::Try => {
                if let Some(answer) = command.answer(self.run_alone(&blocked.words).await) {
                    return self.unblock(command, &answer);
                }
                blocked.found_nothing();
                blocked.pass_on();
            }
            Next::Leave => blocked.pause(),
            Next::Join => match self.join_queues(command, &blocked.keys) {
                Ok(place) => blocked.stage = Stage::Queued(place),
                Err(_) => blocked.pause(),
            },
        }
        self.blocked = Some(blocked);
    }

    /// Whether one of these keys exists. True also if that is not known. Unlike an attempt to take an
    /// element, this read conflicts with no other client's attempt.
    async fn exists(&mut self, keys: &[KeyName]) -> bool {
        let mut words = vec![Bytes::from_static(b"exists")];
        words.extend(keys.iter().map(|(_, name)| name.clone()));
        self.run_alone(&words).await != Reply::Integer(0)
    }

    fn unblock(&mut self, command: Blocking, answer: &Reply) {
        self.runner.front().count_redis(command.name(), matches!(answer, Reply::Error(_)));
        self.write(answer);
    }
}
