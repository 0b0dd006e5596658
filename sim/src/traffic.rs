//! What travels: messages and bytes by kind of message and by role of the sender.

use std::collections::BTreeMap;

use orthodrome_core::cluster::Role;
use serde::Serialize;

/// Messages and bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Count {
    /// How many messages.
    pub messages: u64,
    /// Their sizes, added up.
    pub bytes: u64,
}

impl Count {
    fn add(&mut self, bytes: usize) {
        self.messages += 1;
        self.bytes += bytes as u64;
    }
}

/// What was sent in the measured part of a run.
#[derive(Clone, Default, Debug)]
pub struct Traffic {
    /// Few kinds, looked up for every message: a list with the commonest in front beats a map.
    kinds: Vec<(&'static str, Count)>,
    servers: Count,
    gateways: Count,
    wide_area: Count,
}

impl Traffic {
    /// Counts one message.
    pub fn count(&mut self, kind: &'static str, role: Role, is_wan: bool, bytes: usize) {
        match role {
            Role::Server => self.servers.add(bytes),
            Role::Gateway => self.gateways.add(bytes),
        }
        if is_wan {
            self.wide_area.add(bytes);
        }
        let same = |(name, _): &(&'static str, Count)| {
            // The same text is nearly always the same constant.
            std::ptr::eq(name.as_ptr(), kind.as_ptr()) && name.len() == kind.len() || *name == kind
        };
        match self.kinds.iter().position(same) {
            Some(at) => {
                if let Some((_, count)) = self.kinds.get_mut(at) {
                    count.add(bytes);
                }
                if at > 0
                    && self.kinds.get(at).map(|kind| kind.1.messages)
                        > self.kinds.get(at - 1).map(|kind| kind.1.messages)
                {
                    self.kinds.swap(at, at - 1);
                }
            }
            None => self.kinds.push((kind, Count { messages: 1, bytes: bytes as u64 })),
        }
    }

    /// Everything.
    #[must_use]
    pub fn total(&self) -> Count {
        Count {
            messages: self.servers.messages + self.gateways.messages,
            bytes: self.servers.bytes + self.gateways.bytes,
        }
    }

    /// By role of the sender (`server`, `gateway`), and what crossed regions (`wide-area`).
    #[must_use]
    pub fn by_role(&self) -> BTreeMap<&'static str, Count> {
        [("server", self.servers), ("gateway", self.gateways), ("wide-area", self.wide_area)].into()
    }

    /// By kind of message.
    #[must_use]
    pub fn by_kind(&self) -> BTreeMap<&'static str, Count> {
        self.kinds.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_counted_once_by_role_and_once_by_kind() {
        let mut traffic = Traffic::default();
        for number in 0..100 {
            let kind = if number % 3 == 0 { "Vote" } else { "Append" };
            let role = if number % 2 == 0 { Role::Server } else { Role::Gateway };
            traffic.count(kind, role, number % 4 == 0, 10);
        }
        assert_eq!(traffic.total(), Count { messages: 100, bytes: 1_000 });
        assert_eq!(traffic.by_kind()["Vote"].messages, 34);
        assert_eq!(traffic.by_kind()["Append"].messages, 66);
        assert_eq!(traffic.by_role()["wide-area"].bytes, 250);
    }
}
