//! The keys of a transaction while its commands run.

use std::cell::OnceCell;
use std::collections::VecDeque;

use bytes::Bytes;

use super::entry::{COST_MAX, Content, Entry, Stamp};
use super::number::Score;
use super::reply::{Failure, TOO_LARGE, WRONG_TYPE};
use crate::ordered::{OrdMap, OrdSet};
use crate::txn::Value;

/// What commands need besides their keys.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// The time, in milliseconds since 1970.
    pub now_ms: u64,
    /// The transaction.
    pub stamp: Stamp,
}

/// What a key holds now.
#[derive(Clone, Debug)]
enum Held {
    Absent,
    Entry(Entry),
    /// A value that Redis commands did not write.
    Foreign,
}

/// One key.
#[derive(Clone, Debug)]
pub struct Slot {
    held: Held,
    /// The counted size of the content.
    cost: usize,
    is_changed: bool,
    /// The value before the transaction.
    before: Option<Value>,
    /// While the key does not exist: who noted this for a client that watches it, and until when
    /// in milliseconds since 1970.
    mark: Option<(Stamp, u64)>,
    /// The members of a sorted set in their order, once a command needed it.
    order: OnceCell<Vec<(Score, Bytes)>>,
    /// True if the work of finding this order was counted, whether it was done here or not.
    is_order_counted: bool,
}

macro_rules! typed {
    ($read:ident, $write:ident, $variant:ident, $type:ty) => {
        /// The content of this type, if the key exists.
        pub fn $read(&self) -> Result<Option<&$type>, Failure> {
            match &self.held {
                Held::Absent => Ok(None),
                Held::Entry(Entry { content: Content::$variant(content), .. }) => Ok(Some(content)),
                Held::Entry(_) | Held::Foreign => Err(WRONG_TYPE),
            }
        }

        /// The content of this type, made if the key does not exist, and its counted size. The
        /// caller changes both, and then calls [`Slot::changed`].
        pub fn $write(&mut self) -> Result<(&mut $type, &mut usize), Failure> {
            if matches!(self.held, Held::Absent) {
                let content = Content::$variant(<$type>::default());
                self.cost = content.cost();
                self.held = Held::Entry(Entry { stamp: Stamp::default(), expires_ms: 0, content });
            }
            self.forget_order();
            match &mut self.held {
                Held::Entry(Entry { content: Content::$variant(content), .. }) => {
                    Ok((content, &mut self.cost))
                }
                Held::Absent | Held::Entry(_) | Held::Foreign => Err(WRONG_TYPE),
            }
        }
    };
}

impl Slot {
    /// A key with this value at this time. A key that has expired is absent from now on, which is a
    /// change.
    pub fn new(before: Option<Value>, cx: Context) -> Self {
        let mut held = match &before {
            None => Held::Absent,
            Some(value) => Entry::decode(value).map_or(Held::Foreign, Held::Entry),
        };
        let mut is_changed = false;
        if let Held::Entry(entry) = &held
            && entry.expires_ms != 0
            && entry.expires_ms <= cx.now_ms
        {
            (held, is_changed) = (Held::Absent, true);
        }
        let mut mark = None;
        if let Held::Entry(Entry { stamp, expires_ms, content: Content::Nothing }) = held {
            (held, mark) = (Held::Absent, Some((stamp, expires_ms)));
        }
        let cost = match &held {
            Held::Entry(entry) => entry.content.cost(),
            Held::Absent | Held::Foreign => 0,
        };
        let (order, is_order_counted) = (OnceCell::new(), false);
        Self { held, cost, is_changed, before, mark, order, is_order_counted }
    }

    /// What [`Slot::restore`] needs besides the value before the transaction: the key as it is now,
    /// unless the transaction has not changed it.
    pub fn keep(&self) -> Option<Self> {
        self.is_changed.then(|| self.clone())
    }

    /// Makes the key what it was when [`Slot::keep`] returned this.
    pub fn restore(&mut self, kept: Option<Self>, cx: Context) {
        *self = kept.unwrap_or_else(|| Self::new(self.before.take(), cx));
    }

    /// The counted size of the content.
    pub fn cost(&self) -> usize {
        self.cost
    }

    /// Counts that the members of a sorted set are put in order; false if they were before.
    pub fn count_order(&mut self) -> bool {
        !std::mem::replace(&mut self.is_order_counted, true)
    }

    fn forget_order(&mut self) {
        self.order.take();
        self.is_order_counted = false;
    }

    typed!(string, string_mut, String, Bytes);
    typed!(hash, hash_mut, Hash, OrdMap<Bytes, Bytes>);
    typed!(set, set_mut, Set, OrdSet<Bytes>);
    typed!(list, list_mut, List, VecDeque<Bytes>);
    typed!(sorted, sorted_mut, Sorted, OrdMap<Bytes, Score>);

    /// The members of a sorted set, by score and then by name; empty if the key does not exist.
    pub fn order(&self) -> Result<&[(Score, Bytes)], Failure> {
        let members = self.sorted()?;
        Ok(self.order.get_or_init(|| {
            let members = members.into_iter().flatten();
            let mut order: Vec<_> = members.map(|(name, score)| (*score, name.clone())).collect();
            order.sort_unstable();
            order
        }))
    }

    /// True if the key exists.
    pub fn exists(&self) -> bool {
        !matches!(self.held, Held::Absent)
    }

    /// The content of any type, if the key exists and Redis commands wrote it.
    pub fn content(&self) -> Option<&Content> {
        match &self.held {
            Held::Entry(entry) => Some(&entry.content),
            Held::Absent | Held::Foreign => None,
        }
    }

    /// The name of its type; none if it does not exist.
    pub fn type_name(&self) -> Option<&'static str> {
        match &self.held {
            Held::Absent => None,
            Held::Entry(entry) => Some(entry.content.type_name()),
            Held::Foreign => Some("foreign"),
        }
    }

    /// The time at which the key expires, 0 if it does not; none if it does not exist.
    pub fn expires_ms(&self) -> Option<u64> {
        match &self.held {
            Held::Absent => None,
            Held::Entry(entry) => Some(entry.expires_ms),
            Held::Foreign => Some(0),
        }
    }

    /// Sets the time at which the key expires, if it exists.
    pub fn set_expires_ms(&mut self, at: u64, cx: Context) {
        if let Held::Entry(entry) = &mut self.held {
            entry.expires_ms = at;
            self.changed(cx);
        }
    }

    /// The transaction that changed the key last. If the key does not exist: the one that noted
    /// this for a client, if any.
    pub fn stamp(&self) -> Option<Stamp> {
        match &self.held {
            Held::Absent => self.mark.map(|(stamp, _)| stamp),
            Held::Entry(entry) => Some(entry.stamp),
            Held::Foreign => Some(Stamp::default()),
        }
    }

    /// An error if `more` counted bytes do not fit beside the present value.
    pub fn check_room(&self, more: usize) -> Result<(), Failure> {
        if self.cost.saturating_add(more) > COST_MAX { Err(TOO_LARGE) } else { Ok(()) }
    }

    /// Replaces whatever the key holds.
    pub fn replace(&mut self, content: Content, expires_ms: u64, cx: Context) {
        self.cost = content.cost();
        self.held = Held::Entry(Entry { stamp: cx.stamp, expires_ms, content });
        self.forget_order();
        self.is_changed = true;
    }

    /// Removes the key; true if it existed.
    pub fn remove(&mut self) -> bool {
        let existed = self.exists();
        self.held = Held::Absent;
        self.cost = 0;
        self.forget_order();
        self.is_changed |= existed;
        if existed {
            self.mark = None;
        }
        existed
    }

    /// Notes that the key does not exist, for clients that watch it. A note that is there stays.
    pub fn mark(&mut self, until_ms: u64, cx: Context) {
        if matches!(self.held, Held::Absent) && self.mark.is_none() {
            self.mark = Some((cx.stamp, until_ms));
            self.is_changed = true;
        }
    }

    /// Notes that a command changed the content. A key without elements does not exist.
    pub fn changed(&mut self, cx: Context) {
        self.is_changed = true;
        if let Held::Entry(entry) = &mut self.held {
            entry.stamp = cx.stamp;
            if entry.content.is_vacant() {
                self.remove();
            }
        }
    }

    /// Whether the transaction changed the key.
    pub fn is_changed(&self) -> bool {
        self.is_changed
    }

    /// The value after the transaction.
    pub fn into_value(self) -> Option<Value> {
        if !self.is_changed {
            return self.before;
        }
        match self.held {
            Held::Absent => {
                let entry = |(stamp, expires_ms)| {
                    Entry { stamp, expires_ms, content: Content::Nothing }.encode()
                };
                self.mark.map(entry)
            }
            Held::Entry(entry) => Some(entry.encode()),
            Held::Foreign => self.before,
        }
    }
}
