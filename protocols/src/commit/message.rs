//! Messages between coordinators and participants in protocols where participants vote without
//! being asked (Carousel §4.1). A protocol makes its own messages of these, with its own names and
//! field numbers.

use orthodrome_core::id::{PartitionId, TxnId};

/// A participant's leader → a coordinator's leader. `V` is a vote.
#[derive(Debug)]
pub enum ToCoordinator<V> {
    /// My vote (Carousel §4.1.2).
    Vote { txn: TxnId, coordinator: PartitionId, partition: PartitionId, vote: V },
    /// I prepared this long ago, and so voted; what was decided?
    QueryDecision { txn: TxnId, coordinator: PartitionId, partition: PartitionId, vote: V },
    /// The decision is in my log.
    Ack { txn: TxnId, coordinator: PartitionId, partition: PartitionId },
    /// May this participant forget these outcomes? (R6)
    MayForget { coordinator: PartitionId, partition: PartitionId, txns: Vec<TxnId> },
}

/// A coordinator's leader → a participant's leader, beside the decision. `A` is a participant.
#[derive(Debug)]
pub enum ToParticipant<A> {
    /// How did you vote?
    QueryPrepare { txn: TxnId, participant: A, coordinator: PartitionId },
    /// This coordinator's group will not ask about these outcomes again (R6).
    Forget { partition: PartitionId, coordinator: PartitionId, txns: Vec<TxnId> },
}
