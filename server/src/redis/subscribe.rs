//! The commands of a client that subscribes to channels, and the messages that it receives.

use bytes::Bytes;
use orthodrome_core::procedure::redis::reply::{Failure, Reply, SYNTAX};
use orthodrome_core::procedure::redis::wrong_arity;

use super::connection::Connection;
use super::glob::Pattern;
use super::local::{self, Local};
use super::messages::{Kind, PATTERNS_MAX, SUBSCRIPTIONS_MAX, Status, Subscriber};
use super::reply::{self, Version};

const LATE: Failure = Failure::new(
    "ERR the watch of messages did not begin within limits.request_timeout_ms; try again",
);
const TOO_MANY: Failure = Failure::new(
    "ERR a client has at most 65536 subscriptions, 1024 of them with patterns; use another \
     connection",
);

const TOO_LARGE: Failure = Failure::new(
    "ERR the answer is larger than limits.response_bytes_max; give a pattern, or fewer channels",
);

/// Whether a client of RESP2 may give a command while it has subscriptions.
fn is_for_subscribers(local: Local) -> bool {
    matches!(
        local,
        Local::Subscribe(_) | Local::Unsubscribe(_) | Local::Ping | Local::Quit | Local::Reset
    )
}

fn word(text: &'static str) -> Reply {
    Reply::Bulk(Bytes::from_static(text.as_bytes()))
}

impl Connection {
    /// True if the client speaks RESP2 and has subscriptions. Then it receives messages between the
    /// answers, and most commands are refused.
    pub(super) fn is_subscribed_mode(&self) -> bool {
        self.version == Version::Two && self.subscriber.is_some()
    }

    /// The error for a command that such a client may not give.
    pub(super) fn refused_in_mode(&self, local: Option<Local>, words: &[Bytes]) -> Option<Failure> {
        if !self.is_subscribed_mode() || local.is_some_and(is_for_subscribers) {
            return None;
        }
        let name = match local {
            Some(local) => local.name(),
            None => local::spec(words)?.name,
        };
        Some(Failure::of(format!(
            "ERR Can't execute '{name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / \
             RESET are allowed in this context"
        )))
    }

    /// `SUBSCRIBE channel …` and its relatives: one confirmation for each name.
    pub(super) async fn subscribe(&mut self, kind: Kind, names: &[Bytes]) {
        let subscribed = self.try_subscribe(kind, names).await;
        self.runner.front().count_redis(kind.added(), subscribed.is_err());
        match subscribed {
            Err(failure) => self.write(&Reply::Error(failure)),
            Ok(counts) => {
                for (name, count) in names.iter().zip(counts) {
                    let name = Reply::Bulk(name.clone());
                    self.push(&[word(kind.added()), name, Reply::count(count)]);
                }
            }
        }
    }

    /// The number of subscriptions after each of these names. Without a watch, none is added.
    async fn try_subscribe(&mut self, kind: Kind, names: &[Bytes]) -> Result<Vec<usize>, Failure> {
        self.permit(kind.added(), false)?;
        let has = |count: fn(&Subscriber) -> usize| self.subscriber.as_ref().map_or(0, count);
        let (many, most) = match kind {
            Kind::Pattern => (has(|own| own.counts().1), PATTERNS_MAX),
            Kind::Channel | Kind::Shard => (has(Subscriber::total), SUBSCRIPTIONS_MAX),
        };
        // Before anything of that number is made.
        if many.saturating_add(names.len()) > most {
            return Err(TOO_MANY);
        }
        let mut patterns = Vec::new();
        for name in names.iter().filter(|_| kind == Kind::Pattern) {
            patterns.push(Pattern::parse(name)?);
        }
        let mut subscriber = self
            .subscriber
            .take()
            .unwrap_or_else(|| Subscriber::new(self.runner.hub().clone(), self.number));
        let (mut added, mut counts) = (Vec::new(), Vec::new());
        let result = match self.begin(&subscriber, kind) {
            Err(failure) => Err(failure),
            Ok(mut status) => {
                let mut patterns = patterns.into_iter();
                for name in names {
                    if subscriber.add(kind, name, patterns.next()) {
                        added.push(name);
                    }
                    counts.push(subscriber.shown(kind));
                }
                let time = self.runner.front().limits().request_timeout;
                let begins = status.wait_for(|status| *status != Status::Begins);
                match tokio::time::timeout(time, begins).await {
                    Ok(Ok(status)) => match &*status {
                        Status::Failed(failure) => Err(failure.clone()),
                        Status::Begins | Status::Runs => Ok(counts),
                    },
                    Ok(Err(_)) | Err(_) => Err(LATE),
                }
            }
        };
        if result.is_err() {
            added.into_iter().for_each(|name| subscriber.remove(kind, name));
        }
        self.subscriber = Some(subscriber).filter(|subscriber| subscriber.total() > 0);
        result
    }

    /// Begins the watch of messages, if it does not run.
    fn begin(
        &self,
        subscriber: &Subscriber,
        kind: Kind,
    ) -> Result<tokio::sync::watch::Receiver<Status>, Failure> {
        subscriber.begin(|range| self.begin_watch(kind.added(), range))
    }

    /// `UNSUBSCRIBE [channel …]` and its relatives; all without a name.
    pub(super) fn unsubscribe(&mut self, kind: Kind, names: &[Bytes]) {
        self.runner.front().count_redis(kind.removed(), false);
        let mut all = names.to_vec();
        if all.is_empty() {
            all = self.subscriber.as_ref().map(|own| own.names(kind)).unwrap_or_default();
        }
        let mut shown = self.subscriber.as_ref().map_or(0, |own| own.shown(kind));
        let mut confirmed = Vec::new();
        for name in all {
            if let Some(own) = &mut self.subscriber {
                own.remove(kind, &name);
                shown = own.shown(kind);
            }
            confirmed.push((Reply::Bulk(name), shown));
        }
        if confirmed.is_empty() {
            confirmed.push((Reply::Nil, shown));
        }
        // What has arrived for these channels comes before the confirmation.
        self.take_messages(usize::MAX);
        for (name, count) in confirmed {
            self.push(&[word(kind.removed()), name, Reply::count(count)]);
        }
        if self.subscriber.as_ref().is_some_and(|own| own.total() == 0) {
            self.subscriber = None;
        }
    }

    /// Ends all subscriptions without an answer, if the client may not read any more.
    pub(super) fn check_subscriptions(&mut self) {
        let front = self.runner.front();
        if !self.caller.as_deref().is_some_and(|caller| front.may(caller, false)) {
            self.subscriber = None;
        }
    }

    /// `PUBSUB`: what clients of this node have subscribed to.
    pub(super) fn pubsub(&self, arguments: &[Bytes]) -> Reply {
        let reply = self.try_pubsub(arguments).unwrap_or_else(Reply::Error);
        self.runner.front().count_redis("pubsub", matches!(reply, Reply::Error(_)));
        let most = self.runner.front().limits().response_bytes_max as usize;
        if reply.bytes() > most { Reply::Error(TOO_LARGE) } else { reply }
    }

    fn try_pubsub(&self, arguments: &[Bytes]) -> Result<Reply, Failure> {
        self.permit("pubsub", false)?;
        let (first, rest) = arguments.split_first().ok_or(SYNTAX)?;
        let name = String::from_utf8_lossy(first).to_ascii_lowercase();
        let hub = self.runner.hub();
        let is_shard = name.starts_with("shard");
        match (name.as_str(), rest) {
            ("channels" | "shardchannels", [] | [_]) => {
                let pattern = rest.first().map(Pattern::parse).transpose()?;
                let channels = hub.channels(is_shard, pattern.as_ref());
                Ok(Reply::Array(channels.into_iter().map(Reply::Bulk).collect()))
            }
            ("numsub" | "shardnumsub", _) => {
                let count = |channel: &Bytes| {
                    let many = hub.subscribers(is_shard, channel);
                    [Reply::Bulk(channel.clone()), Reply::count(many)]
                };
                Ok(Reply::Array(rest.iter().flat_map(count).collect()))
            }
            ("numpat", []) => Ok(Reply::count(hub.counts().1)),
            ("channels" | "shardchannels" | "numpat", _) => {
                Err(wrong_arity(&format!("pubsub|{name}")))
            }
            _ => Err(local::subcommand("pubsub", &name)),
        }
    }

    /// Takes messages that have arrived, up to this number of bytes or one more message, to send
    /// them after the answers so far.
    pub(super) fn take_messages(&mut self, bytes_max: usize) {
        let Some(subscriber) = &self.subscriber else { return };
        for delivery in subscriber.inbox().take(bytes_max) {
            let words: Vec<Reply> = delivery.words().into_iter().map(Reply::Bulk).collect();
            reply::push(&words, self.version, self.out());
        }
    }

    fn push(&mut self, items: &[Reply]) {
        reply::push(items, self.version, self.out());
    }
}
