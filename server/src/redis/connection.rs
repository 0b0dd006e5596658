//! One client: its settings, the commands that it has sent, and its transaction.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::procedure::redis::entry::Stamp;
use orthodrome_core::procedure::redis::reply::{Failure, Reply, SYNTAX};
use orthodrome_core::procedure::redis::script::NO_SCRIPT;
use orthodrome_core::procedure::redis::{
    Batch, Command, Evaluation, KeyLimits, KeyName, KeyNames, Refused, Spec, parse, wrong_arity,
};
use orthodrome_core::scan::KeyRange;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::blocking::{Blocked, Next};
use super::local::{self, Deferred, Local};
use super::messages::{Inbox, Subscriber};
use super::reply::{self, Version};
use super::request::{Bounds, Requests, WORD_BYTES};
use super::run::{Runner, Trouble, Work, prefix};
use super::scripts::DIGEST_BYTES;
use crate::scan::{Batches, ScanFailed};
use crate::service::{HeldBytes, Principal, Refusal};

/// The answer instead of one for which there is no room.
const OMITTED: Failure = Failure::new(
    "ERR the answers of these commands are together larger than limits.response_bytes_max; this one \
     is left out, and the command took effect; send fewer commands at once",
);

/// Commands that arrived together run as one transaction, up to this number of them.
const GROUP_COMMANDS_MAX: usize = 128;
/// And up to this number of bytes.
const GROUP_BYTES_MAX: usize = 256 << 10;
/// The most bytes that are dropped after the last answer to a client.
const LINGER_BYTES_MAX: usize = 512 << 20;
/// Answers are sent when they have this number of bytes, also if more requests have arrived.
const OUT_BYTES: usize = 64 << 10;
/// The bytes that each connection may have without counting among those of the node.
const FREE_BYTES: usize = 8 << 10;
/// The databases that `SELECT` knows.
pub(super) const DATABASES: u8 = 16;

/// What a group answers to one request.
#[derive(Debug)]
enum Slot {
    /// The answer of the next command, with the command's name.
    Command(&'static str),
    /// An answer that needs no transaction.
    Ready(Reply),
    /// A command on the connection that runs at `EXEC`, with its arguments.
    Local(Deferred, Vec<Bytes>),
}

/// Commands that run as one transaction.
#[derive(Debug, Default)]
pub(super) struct Group {
    names: KeyNames,
    commands: Vec<Command>,
    slots: Vec<Slot>,
    bytes: usize,
    /// True if a command of a `MULTI` was refused.
    pub(super) is_broken: bool,
}

/// One connection.
pub(super) struct Connection {
    pub(super) runner: Arc<Runner>,
    pub(super) caller: Option<Arc<Principal>>,
    pub(super) number: u64,
    pub(super) name: Bytes,
    pub(super) version: Version,
    pub(super) database: u8,
    /// Commands that arrived outside of `MULTI` and have not run.
    group: Group,
    /// The commands since `MULTI`.
    pub(super) multi: Option<Group>,
    pub(super) watched: OrdMap<KeyName, Option<Stamp>>,
    /// True if a watched key was seen with another stamp.
    is_watch_broken: bool,
    pub(super) is_closing: bool,
    /// Wrong credentials so far.
    pub(super) failures: u32,
    /// Since when it may have to show credentials.
    pub(super) stranger_since: Instant,
    /// Who it is without a password: the holder of its certificate.
    pub(super) holder: Option<Arc<Principal>>,
    buffer: BytesMut,
    requests: Requests,
    out: BytesMut,
    held: Option<HeldBytes>,
    /// Held while an answer of `KEYS` waits in `out`.
    pub(super) listed: Option<OwnedSemaphorePermit>,
    /// While it has subscriptions.
    pub(super) subscriber: Option<Subscriber>,
    /// While a command blocks the client. The node answers later requests after that.
    pub(super) blocked: Option<Blocked>,
}

impl Connection {
    pub(super) fn new(runner: Arc<Runner>, caller: Option<Arc<Principal>>, number: u64) -> Self {
        Self {
            runner,
            holder: caller.clone(),
            caller,
            number,
            name: Bytes::new(),
            version: Version::Two,
            database: 0,
            group: Group::default(),
            multi: None,
            watched: OrdMap::new(),
            is_watch_broken: false,
            is_closing: false,
            failures: 0,
            stranger_since: Instant::now(),
            buffer: BytesMut::new(),
            requests: Requests::default(),
            out: BytesMut::new(),
            held: None,
            listed: None,
            subscriber: None,
            blocked: None,
        }
    }

    /// Answers requests until the client or the node ends.
    pub(super) async fn run(
        mut self,
        stream: impl AsyncRead + AsyncWrite + Unpin,
        ending: CancellationToken,
    ) -> std::io::Result<()> {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let time = self.runner.front().limits().request_timeout;
        loop {
            self.answer_all(&mut writer).await?;
            if !self.is_closing {
                self.take_messages(OUT_BYTES);
            }
            self.send(&mut writer).await?;
            if self.is_closing {
                writer.shutdown().await?;
                return self.linger(&mut reader, &ending).await;
            }
            self.release();
            if self.buffer.is_empty() {
                // An idle connection keeps nothing of the largest request that it has had.
                self.buffer = BytesMut::new();
            }
            self.buffer.reserve(if self.requests.bytes() > 0 { OUT_BYTES } else { 4 << 10 });
            let is_stranger = self.caller.is_none();
            let until = self.stranger_since + time;
            let inbox = self.subscriber.as_ref().map(|subscriber| Arc::clone(subscriber.inbox()));
            let read = tokio::select! {
                () = ending.cancelled() => return writer.shutdown().await,
                received = message(inbox.as_deref()) => {
                    received?;
                    continue;
                }
                () = tokio::time::sleep_until(until), if is_stranger => {
                    return writer.shutdown().await;
                }
                next = next(self.blocked.as_mut()) => {
                    self.resume(next).await;
                    continue;
                }
                read = reader.read_buf(&mut self.buffer) => read?,
            };
            if read == 0 {
                return Ok(());
            }
            if self.blocked.is_some() {
                self.count_later_requests();
            }
        }
    }

    /// Counts the requests that follow a blocking command. The node reads them although it answers them
    /// later, because only a read shows that the client has left. A client that sends too many loses its
    /// connection.
    fn count_later_requests(&mut self) {
        let most = self.bounds().request_bytes_max;
        let counted = match self.buffer.len() > most {
            true => Err(format!(
                "more than {most} bytes of requests follow a blocking command, which is limits.request_bytes_max"
            )),
            false => self.account(),
        };
        if let Err(why) = counted {
            self.blocked = None;
            self.is_closing = true;
            self.write(&Reply::Error(Failure::of(format!("ERR {why}"))));
        }
    }

    /// Drops what the client still sends, for a while. A connection that is closed with unread bytes
    /// loses the last answer, which says why it is closed: a request that is too large, for example.
    async fn linger(
        &mut self,
        reader: &mut (impl AsyncRead + Unpin),
        ending: &CancellationToken,
    ) -> std::io::Result<()> {
        if self.caller.is_none() {
            return Ok(());
        }
        (self.buffer, self.requests, self.multi) = Default::default();
        self.watched.clear();
        (self.subscriber, self.blocked) = (None, None);
        self.held = None;
        let time = self.runner.front().limits().request_timeout;
        let mut dropped = vec![0; OUT_BYTES];
        let mut left = LINGER_BYTES_MAX;
        let all = async {
            while left > 0 {
                let read = reader.read(&mut dropped).await?;
                if read == 0 {
                    break;
                }
                left = left.saturating_sub(read);
            }
            Ok(())
        };
        tokio::select! {
            () = ending.cancelled() => Ok(()),
            ended = tokio::time::timeout(time, all) => ended.unwrap_or(Ok(())),
        }
    }

    fn bounds(&self) -> Bounds {
        if self.caller.is_none() {
            return Bounds::STRANGER;
        }
        let limits = self.runner.front().limits();
        let request_bytes_max = limits.request_bytes_max as usize;
        Bounds {
            request_bytes_max,
            word_bytes_max: limits.value_bytes_max as usize,
            words_max: request_bytes_max / super::request::WORD_BYTES,
        }
    }

    /// Answers every request that has arrived completely.
    async fn answer_all(&mut self, writer: &mut (impl AsyncWrite + Unpin)) -> std::io::Result<()> {
        while !self.is_closing && self.blocked.is_none() {
            let bounds = self.bounds();
            let next = self.requests.next(&mut self.buffer, bounds);
            if let Err(busy) = self.account() {
                self.group.ready(Reply::Error(Failure::of(format!("ERR {busy}"))));
                self.is_closing = true;
                break;
            }
            match next {
                Ok(Some((words, bytes))) => self.handle(&words, bytes).await,
                Ok(None) => break,
                Err(malformed) => {
                    let text = format!("ERR Protocol error: {}", malformed.0);
                    self.group.ready(Reply::Error(Failure::of(text)));
                    self.is_closing = true;
                }
            }
            if self.group.bytes > GROUP_BYTES_MAX {
                self.flush().await;
            }
            if self.out.len() >= OUT_BYTES {
                self.send(writer).await?;
            }
        }
        self.flush().await;
        Ok(())
    }

    /// Sends the answers so far. A client that does not take them in time loses its connection.
    async fn send(&mut self, writer: &mut (impl AsyncWrite + Unpin)) -> std::io::Result<()> {
        if self.out.is_empty() {
            return Ok(());
        }
        let out = std::mem::take(&mut self.out);
        let time = self.runner.front().limits().request_timeout;
        let sent = async {
            writer.write_all(&out).await?;
            writer.flush().await
        };
        let inbox = self.subscriber.as_ref().map(Subscriber::inbox);
        let sent = tokio::select! {
            lost = ended(inbox.map(AsRef::as_ref)) => return Err(lost),
            sent = tokio::time::timeout(time, sent) => sent,
        };
        drop(out);
        if let Some(inbox) = inbox {
            inbox.sent();
        }
        self.listed = None;
        sent.map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))?
    }

    /// The bytes that the connection keeps for its client.
    fn bytes(&self) -> usize {
        let queued = self.multi.as_ref().map_or(0, |queue| queue.bytes);
        // A request that has begun counts whole, with the part of it that is in the buffer.
        let begun = match self.requests.bytes() {
            0 => self.buffer.len(),
            whole => whole,
        };
        let watched: usize = self.watched.keys().map(|(_, name)| name.len()).sum();
        let subscribed = self.subscriber.as_ref().map_or(0, Subscriber::bytes);
        let blocked = self.blocked.as_ref().map_or(0, Blocked::bytes);
        begun + self.group.bytes + queued + watched + subscribed + blocked
    }

    /// Counts the bytes of this connection among those of the node.
    fn account(&mut self) -> Result<(), String> {
        let wanted = self.bytes().saturating_sub(FREE_BYTES);
        let front = self.runner.front();
        match &mut self.held {
            None if wanted > 0 => self.held = Some(front.hold(wanted)?),
            Some(held) if wanted > held.bytes() => {
                let more = wanted - held.bytes();
                front.hold_more(held, more)?;
            }
            None | Some(_) => {}
        }
        Ok(())
    }

    /// Stops counting bytes if the connection keeps few.
    fn release(&mut self) {
        if self.bytes() <= FREE_BYTES {
            self.held = None;
        }
    }

    /// Answers one request, at once or with the group.
    async fn handle(&mut self, words: &[Bytes], bytes: usize) {
        let Some((name, arguments)) = words.split_first() else { return };
        let local = Local::find(name);
        if self.caller.is_none() && !local.is_some_and(Local::is_for_strangers) {
            self.group.ready(Reply::Error(Failure::new("NOAUTH Authentication required.")));
            return;
        }
        if let Some(failure) = self.refused_in_mode(local, words) {
            self.group.ready(Reply::Error(failure));
            return;
        }
        match local {
            Some(local) => self.local(local, arguments).await,
            None if self.multi.is_some() => {
                let answer = self.queue(words, bytes);
                if matches!(answer, Reply::Error(_))
                    && let Some(queue) = &mut self.multi
                {
                    queue.is_broken = true;
                }
                self.group.ready(answer);
            }
            None => self.gather(words, bytes).await,
        }
    }

    /// An empty group of commands on the selected database.
    pub(super) fn group(&self) -> Group {
        let mut group = Group::default();
        group.select(self.database);
        group
    }

    /// Checks that the client may run the command `name`.
    pub(super) fn permit(&self, name: &str, is_write: bool) -> Result<(), Failure> {
        let may = |caller: &Principal| self.runner.front().may(caller, is_write);
        if self.caller.as_deref().is_some_and(may) {
            return Ok(());
        }
        Err(Failure::of(format!("NOPERM this user has no permissions to run the '{name}' command")))
    }

    /// Begins a watch of these keys for the command `name`.
    pub(super) fn begin_watch(&self, name: &str, range: KeyRange) -> Result<Batches, Failure> {
        let Some(caller) = &self.caller else { return Err(SYNTAX) };
        let why = match self.runner.front().watch(caller, range) {
            Ok(Ok(batches)) => return Ok(batches),
            Ok(Err(ScanFailed::Unsupported)) => {
                format!("ERR command '{name}' is not available with this cluster's protocol")
            }
            Ok(Err(failed)) => format!("ERR the watch did not begin: {failed}"),
            Err(Refusal::Denied(why)) => format!("NOPERM {why}"),
            Err(Refusal::Busy(why) | Refusal::Never(why)) => format!("ERR {why}"),
        };
        Err(Failure::of(why))
    }

    /// The bounds of keys of a database.
    fn key_limits(&self, database: u8) -> KeyLimits {
        let limits = self.runner.front().limits();
        let prefix = prefix(database).len();
        KeyLimits {
            keys_max: limits.keys_max as usize,
            key_bytes_max: (limits.key_bytes_max as usize).saturating_sub(prefix),
        }
    }

    /// Reads a command on data, of `bytes` bytes; the bytes that it keeps, too. Keys of a command that
    /// is refused are not kept.
    fn parse(
        &self,
        words: &[Bytes],
        bytes: usize,
        names: &mut KeyNames,
    ) -> Result<(&'static str, Command, usize), Refused> {
        let early = |failure| Refused { failure, is_early: true };
        let Some(spec) = local::spec(words) else { return Err(early(local::unknown(words))) };
        let Spec { name, is_read_only, .. } = *spec;
        self.permit(name, !is_read_only).map_err(early)?;
        let is_digest = words.get(1).is_some_and(|digest| digest.len() == DIGEST_BYTES);
        if name.starts_with("evalsha") && words.len() > 2 && !is_digest {
            return Err(Refused { failure: NO_SCRIPT, is_early: false });
        }
        let named = self.named_script(name, words);
        let (words, more) = match &named {
            Some((words, more)) => (words.as_slice(), *more),
            None => (words, 0),
        };
        let known = names.names().len();
        let Some(command) = parse(words, names, self.key_limits(names.database())) else {
            return Err(early(local::unknown(words)));
        };
        let command = command?;
        if let Command::Script(script) = &command
            && let Err(failure) = self.runner.scripts().add(&script.text)
        {
            names.truncate(known);
            return Err(Refused { failure, is_early: false });
        }
        Ok((name, command, bytes + more))
    }

    /// The words of `EVALSHA` with the text instead of its digest, if the node knows it; by how many
    /// bytes they are more, too.
    fn named_script(&self, name: &str, words: &[Bytes]) -> Option<(Vec<Bytes>, usize)> {
        let evaluates = match name {
            "evalsha" => "eval",
            "evalsha_ro" => "eval_ro",
            _ => return None,
        };
        let text = self.runner.scripts().get(words.get(1)?)?;
        let more = text.len();
        let mut replaced = vec![Bytes::from_static(evaluates.as_bytes()), text];
        replaced.extend_from_slice(words.get(2..)?);
        Some((replaced, more))
    }

    /// `SCRIPT`: what the node knows of scripts.
    pub(super) fn script(&self, arguments: &[Bytes]) -> Reply {
        let scripts = self.runner.scripts();
        let Some((first, rest)) = arguments.split_first() else { return Reply::Nil };
        let word = String::from_utf8_lossy(first).to_ascii_lowercase();
        match (word.as_str(), rest) {
            ("load", [text]) => match scripts.add(text) {
                Ok(digest) => Reply::Bulk(digest.into()),
                Err(failure) => Reply::Error(failure),
            },
            ("exists", [_, ..]) => {
                let known = |digest: &Bytes| Reply::flag(scripts.get(digest).is_some());
                Reply::Array(rest.iter().map(known).collect())
            }
            ("flush", [] | [_])
                if rest.iter().all(|mode| {
                    mode.eq_ignore_ascii_case(b"sync") || mode.eq_ignore_ascii_case(b"async")
                }) =>
            {
                scripts.clear();
                Reply::OK
            }
            ("flush", _) => {
                Reply::Error(Failure::new("ERR SCRIPT FLUSH only support SYNC|ASYNC option"))
            }
            ("kill", []) => {
                Reply::Error(Failure::new("NOTBUSY No scripts in execution right now."))
            }
            ("load" | "exists" | "kill", _) => Reply::Error(wrong_arity(&format!("script|{word}"))),
            _ => Reply::Error(local::subcommand("script", &word)),
        }
    }

    /// Adds a command to the group of those that arrived together.
    async fn gather(&mut self, words: &[Bytes], bytes: usize) {
        let keys_max = self.key_limits(self.database).keys_max;
        if self.group.commands.len() >= GROUP_COMMANDS_MAX
            || (!self.group.commands.is_empty()
                && (self.group.bytes + bytes > GROUP_BYTES_MAX
                    || self.group.names.names().len() + words.len() > keys_max))
        {
            self.flush().await;
        }
        let mut names = std::mem::take(&mut self.group.names);
        names.select(self.database);
        let parsed = self.parse(words, bytes, &mut names);
        self.group.names = names;
        match parsed {
            Ok((name, command, bytes)) => self.group.add(name, command, bytes),
            Err(refused) => self.group.ready(Reply::Error(refused.failure)),
        }
    }

    /// Adds a command to the transaction since `MULTI`.
    fn queue(&mut self, words: &[Bytes], bytes: usize) -> Reply {
        let Some(mut queue) = self.multi.take() else { return Reply::Nil };
        let parsed = match self.check_room(&queue, bytes) {
            Err(failure) => Err(Refused { failure, is_early: true }),
            Ok(()) => self.parse(words, bytes, &mut queue.names),
        };
        let answer = match parsed {
            // With the text of a script.
            Ok((_, _, bytes)) if let Err(failure) = self.check_room(&queue, bytes) => {
                Reply::Error(failure)
            }
            Ok((name, command, bytes)) => {
                queue.add(name, command, bytes);
                Reply::Status("QUEUED")
            }
            Err(refused) if refused.is_early => Reply::Error(refused.failure),
            // It fails when the transaction runs, as in Redis.
            Err(refused) => {
                queue.ready(Reply::Error(refused.failure));
                Reply::Status("QUEUED")
            }
        };
        self.multi = Some(queue);
        answer
    }

    /// An error if one more command of `bytes` bytes does not fit into a transaction.
    fn check_room(&self, queue: &Group, bytes: usize) -> Result<(), Failure> {
        let limits = self.runner.front().limits();
        let (bytes_max, ops_max) = (limits.request_bytes_max as usize, limits.ops_max as usize);
        if queue.bytes + bytes > bytes_max {
            return Err(Failure::of(format!(
                "ERR the transaction would have more than {bytes_max} bytes, which is \
                 limits.request_bytes_max"
            )));
        }
        if queue.slots.len() >= ops_max {
            return Err(Failure::of(format!(
                "ERR the transaction would have more than {ops_max} commands, which is limits.ops_max"
            )));
        }
        Ok(())
    }

    /// Refuses a request. A `MULTI` with a refused request does nothing at `EXEC`.
    pub(super) fn refuse(&mut self, failure: Failure) {
        if let Some(queue) = &mut self.multi {
            queue.is_broken = true;
        }
        self.group.ready(Reply::Error(failure));
    }

    /// Adds a command on the connection to the transaction since `MULTI`.
    pub(super) fn defer(&mut self, local: Deferred, arguments: &[Bytes]) {
        let Some(queue) = &self.multi else { return };
        let bytes =
            WORD_BYTES + arguments.iter().map(|word| word.len() + WORD_BYTES).sum::<usize>();
        if let Err(failure) = self.check_room(queue, bytes) {
            return self.refuse(failure);
        }
        if let Some(queue) = &mut self.multi {
            queue.slots.push(Slot::Local(local, arguments.to_vec()));
            queue.bytes += bytes;
        }
        self.group.ready(Reply::Status("QUEUED"));
    }

    /// Answers a request that needs no transaction, after those before it; in a `MULTI`, with the
    /// transaction.
    pub(super) fn reply(&mut self, answer: Reply) {
        let bytes_max = self.runner.front().limits().request_bytes_max as usize;
        match &mut self.multi {
            Some(queue) if queue.bytes + answer.bytes() > bytes_max => {
                queue.is_broken = true;
                self.group.ready(Reply::Error(Failure::of(format!(
                    "ERR the transaction would have more than {bytes_max} bytes, which is \
                     limits.request_bytes_max"
                ))));
            }
            Some(queue) => {
                queue.ready(answer);
                self.group.ready(Reply::Status("QUEUED"));
            }
            None => self.group.ready(answer),
        }
    }

    /// Answers a request at once, after those before it.
    pub(super) async fn reply_now(&mut self, answer: Reply) {
        self.flush().await;
        self.write(&answer);
    }

    /// The bytes that are sent next.
    pub(super) fn out(&mut self) -> &mut BytesMut {
        &mut self.out
    }

    pub(super) fn write(&mut self, answer: &Reply) {
        reply::write(answer, self.version, &mut self.out);
    }

    /// Runs the group as one transaction, and writes its answers.
    pub(super) async fn flush(&mut self) {
        let group = std::mem::take(&mut self.group);
        if group.slots.is_empty() {
            return;
        }
        let answers = match self.transact(&group, &[]).await {
            // Each command alone may be small enough.
            Err(Trouble::TooLarge) if group.commands.len() > 1 => {
                let mut left = self.runner.front().limits().response_bytes_max as usize;
                let mut answers = Vec::new();
                for command in &group.commands {
                    let one = std::slice::from_ref(command);
                    let answer = self.run_commands(&group, one, &[]).await;
                    let answer =
                        answer.unwrap_or_else(|trouble| vec![Reply::Error(trouble.failure())]);
                    for answer in answer {
                        let bytes = answer.bytes();
                        // An error says itself what the command did.
                        let fits = bytes <= left || matches!(answer, Reply::Error(_));
                        left = left.saturating_sub(bytes);
                        answers.push(if fits { answer } else { Reply::Error(OMITTED) });
                    }
                }
                answers
            }
            Err(trouble) => {
                vec![Reply::Error(trouble.failure()); group.commands.len()]
            }
            Ok(answers) => answers,
        };
        for answer in self.merge(group, answers) {
            self.write(&answer);
        }
    }

    /// The answers of a group in the order of its requests.
    fn merge(&mut self, group: Group, answers: Vec<Reply>) -> Vec<Reply> {
        let Group { names, commands, slots, .. } = group;
        let mut answers = commands.iter().zip(answers);
        let in_order = slots.into_iter().map(|slot| match slot {
            Slot::Ready(answer) => answer,
            Slot::Local(local, arguments) => self.run_local(local, &arguments),
            Slot::Command(name) => {
                let mut answer = Reply::Nil;
                if let Some((command, own)) = answers.next() {
                    answer = self.with_receivers(&names, command, own);
                }
                self.runner.front().count_redis(name, matches!(answer, Reply::Error(_)));
                answer
            }
        });
        in_order.collect()
    }

    /// The answer to a command. That of `PUBLISH` is the number of clients of this node that
    /// receive the message.
    fn with_receivers(&self, names: &KeyNames, command: &Command, answer: Reply) -> Reply {
        if let (Command::Publish { channel, .. }, Reply::Integer(_)) = (command, &answer)
            && let Some((database, name)) = names.names().get(*channel as usize)
        {
            return Reply::count(self.runner.hub().receivers(*database, name));
        }
        answer
    }

    async fn transact(
        &mut self,
        group: &Group,
        watched: &[(u32, Option<Stamp>)],
    ) -> Result<Vec<Reply>, Trouble> {
        if group.commands.is_empty() {
            return Ok(Vec::new());
        }
        self.run_commands(group, &group.commands, watched).await
    }

    async fn run_commands(
        &mut self,
        group: &Group,
        commands: &[Command],
        watched: &[(u32, Option<Stamp>)],
    ) -> Result<Vec<Reply>, Trouble> {
        let Some(caller) = self.caller.clone() else { return Ok(Vec::new()) };
        let keys = group.names.names();
        let work = Work { keys, commands, watched };
        let (batch, evaluation) = self.runner.run(&caller, &work).await?;
        self.compare(keys, &batch, &evaluation);
        Ok(evaluation.replies)
    }

    /// Whether a command on data is well formed and permitted.
    pub(super) fn check(&self, words: &[Bytes]) -> Result<(), Failure> {
        let mut names = self.group().names;
        self.parse(words, 0, &mut names).map(drop).map_err(|refused| refused.failure)
    }

    /// Runs one command on data, as a transaction of its own.
    pub(super) async fn run_alone(&mut self, words: &[Bytes]) -> Reply {
        let mut group = self.group();
        let command = match self.parse(words, 0, &mut group.names) {
            Ok((_, command, _)) => command,
            Err(refused) => return Reply::Error(refused.failure),
        };
        match self.run_commands(&group, &[command], &[]).await {
            Ok(answers) => answers.into_iter().next().unwrap_or(Reply::Nil),
            Err(trouble) => Reply::Error(trouble.failure()),
        }
    }

    /// Notes whether a watched key has another stamp than before.
    fn compare(&mut self, keys: &[KeyName], batch: &Batch, found: &Evaluation) {
        if self.watched.is_empty() {
            return;
        }
        let found = keys.iter().zip(&batch.keys).zip(&found.stamps);
        for ((name, access), stamp) in found {
            let before = self.watched.get(name).filter(|_| access.reads);
            self.is_watch_broken |= before.is_some_and(|before| before != stamp);
        }
    }

    /// `WATCH`: remembers the stamps of keys.
    pub(super) async fn watch(&mut self, names: &[Bytes]) -> Reply {
        let mut group = self.group();
        let limits = self.key_limits(self.database);
        for key in self.watched.keys() {
            if let Err(failure) = group.names.number_of(key, self.key_limits(key.0)) {
                return Reply::Error(failure);
            }
        }
        let known = group.names.names().len();
        for name in names {
            if let Err(failure) = group.names.number(name, limits) {
                return Reply::Error(failure);
            }
        }
        let keys = group.names.names().get(known..).unwrap_or_default();
        match self.stamps(keys).await {
            Ok(stamps) => {
                self.watched.extend(keys.iter().cloned().zip(stamps));
                Reply::OK
            }
            Err(trouble) => Reply::Error(trouble.failure()),
        }
    }

    /// The stamps of keys. One that does not exist gets one, so that somebody who makes and removes
    /// it is noticed. A principal that may only read leaves none, because its transactions
    /// change nothing.
    async fn stamps(&self, keys: &[KeyName]) -> Result<Vec<Option<Stamp>>, Trouble> {
        let Some(caller) = self.caller.as_ref().filter(|_| !keys.is_empty()) else {
            return Ok(Vec::new());
        };
        let all = (0_u32..).take(keys.len()).collect();
        let commands = [Command::Watch(all)];
        let work = Work { keys, commands: &commands, watched: &[] };
        let mut stamps = self.runner.run(caller, &work).await?.1.stamps;
        let absent = (0_u32..).zip(&stamps).filter(|(_, stamp)| stamp.is_none());
        let absent: Vec<u32> = absent.map(|(key, _)| key).collect();
        if absent.is_empty() || !self.runner.front().may(caller, true) {
            return Ok(stamps);
        }
        let commands = [Command::Mark(absent)];
        let work = Work { keys, commands: &commands, watched: &[] };
        let (batch, found) = self.runner.run(caller, &work).await?;
        for ((stamp, now), access) in stamps.iter_mut().zip(found.stamps).zip(&batch.keys) {
            if access.writes && stamp.is_none() {
                *stamp = now.or(Some(batch.stamp));
            }
        }
        Ok(stamps)
    }

    /// Forgets the watched keys.
    pub(super) fn unwatch(&mut self) {
        self.watched.clear();
        self.is_watch_broken = false;
    }

    /// `EXEC`: runs the commands since `MULTI` as one transaction.
    pub(super) async fn exec(&mut self) -> Reply {
        let Some(mut queue) = self.multi.take() else {
            return Reply::Error(Failure::new("ERR EXEC without MULTI"));
        };
        let (watched, is_watch_broken) = (std::mem::take(&mut self.watched), self.is_watch_broken);
        self.unwatch();
        if queue.is_broken {
            return Reply::Error(Failure::new(
                "EXECABORT Transaction discarded because of previous errors.",
            ));
        }
        if is_watch_broken {
            return Reply::NilArray;
        }
        let mut stamps = Vec::new();
        for (key, stamp) in &watched {
            match queue.names.number_of(key, self.key_limits(key.0)) {
                Ok(number) => stamps.push((number, *stamp)),
                Err(failure) => return Reply::Error(failure),
            }
        }
        if queue.commands.is_empty() && !stamps.is_empty() {
            // Without commands, the watched keys still decide between a list and nothing.
            queue.commands.push(Command::Watch(stamps.iter().map(|(key, _)| *key).collect()));
        }
        match self.transact(&queue, &stamps).await {
            Ok(answers) => Reply::Array(self.merge(queue, answers)),
            Err(Trouble::Watch) => Reply::NilArray,
            Err(trouble) => Reply::Error(trouble.failure()),
        }
    }
}

/// Waits until a blocked client has something to do.
async fn next(blocked: Option<&mut Blocked>) -> Next {
    match blocked {
        Some(blocked) => blocked.next().await,
        None => std::future::pending().await,
    }
}

/// Waits for a message, or until the client must lose its connection.
async fn message(inbox: Option<&Inbox>) -> std::io::Result<()> {
    let Some(inbox) = inbox else { return std::future::pending().await };
    tokio::select! {
        lost = ended(Some(inbox)) => Err(lost),
        () = inbox.message() => Ok(()),
    }
}

/// Waits until the client must lose its connection.
async fn ended(inbox: Option<&Inbox>) -> std::io::Error {
    let Some(inbox) = inbox else { return std::future::pending().await };
    inbox.ended().await;
    std::io::Error::other(
        "too many messages wait for the client, or messages were missed because their watch ended",
    )
}

impl Group {
    /// Keys of later commands belong to this database.
    pub(super) fn select(&mut self, database: u8) {
        self.names.select(database);
    }

    fn add(&mut self, name: &'static str, mut command: Command, bytes: usize) {
        if let Command::Publish { place, .. } = &mut command {
            *place = u32::try_from(self.commands.len()).unwrap_or(u32::MAX);
        }
        self.commands.push(command);
        self.slots.push(Slot::Command(name));
        self.bytes += bytes;
    }

    fn ready(&mut self, answer: Reply) {
        self.bytes += answer.bytes();
        self.slots.push(Slot::Ready(answer));
    }
}
