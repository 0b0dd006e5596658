//! Remembers which versions this gateway has reported to its clients, for clients that do not send
//! that themselves (`BeginRequest.session`). It is a default with bounded memory: a client that
//! changes gateways, or that many others have displaced, must send the versions.

use std::sync::{Mutex, PoisonError};

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::session::{Floors, Session};
use orthodrome_core::txn::{Op, Reads, Writes};
use orthodrome_core::{ClientId, Timestamp, Txn};

/// Maximum number of remembered clients: those that were answered last.
const CLIENTS_MAX: usize = 1_024;
/// Maximum number of remembered keys of one client, and of their bytes.
const KEYS_MAX: usize = 256;
const BYTES_MAX: usize = 16 << 10;

/// The versions that clients know.
#[derive(Debug, Default)]
pub(super) struct Sessions(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    sessions: OrdMap<ClientId, (Session, u64)>,
    /// Clients in the order of their last answers.
    order: OrdMap<u64, ClientId>,
    told: u64,
}

/// The effect of a committed transaction.
#[derive(Clone, Copy, Debug)]
pub(super) enum Did<'a> {
    /// It wrote these values.
    Wrote(&'a Writes),
    /// It ran these operations.
    Ran(&'a [Op]),
}

impl Sessions {
    /// Records that a client learns of the commit of its transaction.
    pub(super) fn told(
        &self,
        client: ClientId,
        at: Timestamp,
        reads: Option<&Reads>,
        did: Did<'_>,
    ) {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Table { sessions, order, told } = &mut *table;
        *told += 1;
        let new = || (Session::bounded(KEYS_MAX, BYTES_MAX), *told);
        let (session, last) = sessions.entry(client).or_insert_with(new);
        order.remove(last);
        *last = *told;
        order.insert(*told, client);
        if let Some(reads) = reads {
            session.read(reads);
        }
        match did {
            Did::Wrote(writes) => session.wrote(at, writes),
            Did::Ran(ops) => session.ran(at, ops),
        }
        if sessions.len() > CLIENTS_MAX
            && let Some((_, oldest)) = order.pop_first()
        {
            sessions.remove(&oldest);
        }
    }

    /// The versions that the transaction's client knows of its keys, from its request and from this
    /// table.
    pub(super) fn floors_of(&self, txn: &Txn) -> Floors {
        let mut floors = txn.floors.clone();
        let table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((session, _)) = table.sessions.get(&txn.id.client) else { return floors };
        for (key, floor) in session.floors_of(txn.reads.iter().chain(&txn.writes)) {
            let known = floors.entry(key).or_default();
            if known.timestamp < floor.timestamp {
                *known = floor;
            }
        }
        floors
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::session::Floor;
    use orthodrome_core::{RegionId, TxnId};

    use super::*;

    fn txn(client: u64) -> Txn {
        let id = TxnId::new(ClientId(client), 2);
        Txn::interactive(id, RegionId(0), vec!["k".into(), "l".into()], vec![])
    }

    #[test]
    fn the_higher_of_both_accounts_counts() {
        let sessions = Sessions::default();
        let writes = Writes::from([("k".into(), Some("v".into()))]);
        sessions.told(ClientId(1), Timestamp(5), None, Did::Wrote(&writes));
        let floors = |timestamp| {
            let floor = Floor { timestamp: Timestamp(timestamp), is_deletion: false };
            Floors::from([("k".into(), floor)])
        };
        assert_eq!(sessions.floors_of(&txn(1)), floors(5));
        assert_eq!(sessions.floors_of(&txn(2)), Floors::new());
        for (said, counts) in [(4, 5), (6, 6)] {
            let txn = Txn { floors: floors(said), ..txn(1) };
            assert_eq!(sessions.floors_of(&txn), floors(counts));
        }
    }

    #[test]
    fn the_clients_that_were_told_something_last_are_remembered() {
        let sessions = Sessions::default();
        let ops = [Op::Put("k".into(), "v".into())];
        for client in 1..=CLIENTS_MAX as u64 + 5 {
            sessions.told(ClientId(1), Timestamp(5), None, Did::Ran(&ops));
            sessions.told(ClientId(client), Timestamp(5), None, Did::Ran(&ops));
        }
        let table = sessions.0.lock().unwrap();
        assert_eq!((table.sessions.len(), table.order.len()), (CLIENTS_MAX, CLIENTS_MAX));
        drop(table);
        assert_eq!(sessions.floors_of(&txn(1)).len(), 1);
        assert!(sessions.floors_of(&txn(2)).is_empty());
    }
}
