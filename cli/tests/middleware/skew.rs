//! Two transactions each name a row by its key that does not meet another condition, and then change
//! the row that the other one has named. The statements find no row, so the rows must be locked all
//! the same: no source sees more than half of the conflict.

use orthodrome_geotp::sql::Dialect;
use orthodrome_middleware::local::{Client, Refused};
use tokio::runtime::Runtime;

use crate::rig::rig;

/// Whether the rest of a transaction succeeds.
async fn ends(client: &mut Client, rest: [&str; 2]) -> bool {
    for text in rest {
        match client.text(text).await {
            Ok(_) => {}
            Err(Refused::Fault(_)) => {
                let _ = client.text("ROLLBACK").await;
                return false;
            }
            Err(Refused::Broken(error)) => panic!("{text}: {error}"),
        }
    }
    true
}

fn at_most_one_commits(servers: &[usize], agents: bool) {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(servers, agents);
    let looks = [
        "SELECT balance FROM accounts WHERE id = ID AND balance > 5000",
        "UPDATE accounts SET balance = 0 WHERE id = ID AND balance > 5000",
        "DELETE FROM accounts WHERE id = ID AND balance > 5000",
        "SELECT count(*) FROM accounts WHERE id IN (ID) AND balance > 5000",
    ];
    Runtime::new().unwrap().block_on(async {
        for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
            for look in looks {
                let reset = "UPDATE accounts SET balance = 1000 WHERE id IN (5, 105)";
                rig.psql(reset);
                let mut one = Client::enter(&rig.login(kind)).await.unwrap();
                let mut other = Client::enter(&rig.login(kind)).await.unwrap();
                for (client, id) in [(&mut one, "5"), (&mut other, "105")] {
                    let text = look.replace("ID", id);
                    client.text("BEGIN").await.unwrap();
                    client.text(&text).await.unwrap_or_else(|error| panic!("{text}: {error}"));
                }
                let (one, other) = tokio::join!(
                    ends(&mut one, ["UPDATE accounts SET balance = 6000 WHERE id = 105", "COMMIT"]),
                    ends(&mut other, ["UPDATE accounts SET balance = 6000 WHERE id = 5", "COMMIT"]),
                );
                assert!(!(one && other), "{}\n{kind}: {look}: both have committed", rig.log());
                rig.finish();
            }
        }
    });
}

#[test]
fn a_row_that_does_not_meet_the_condition_is_locked_on_postgresql() {
    at_most_one_commits(&[0, 2], false);
}

#[test]
fn a_row_that_does_not_meet_the_condition_is_locked_on_mariadb() {
    at_most_one_commits(&[1, 3], false);
}

#[test]
fn a_row_that_does_not_meet_the_condition_is_locked_on_both_with_agents() {
    at_most_one_commits(&[0, 1], true);
}
