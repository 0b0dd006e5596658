//! Moves money between two accounts of a running cluster, and prints the outcome.
//!
//! ```text
//! cargo run -p orthodrome-client --example transfer -- localhost:7400 alice bob 10
//! ```
//!
//! If the cluster needs a token, set `ORTHODROME_TOKEN`.

use std::error::Error;
use std::process::ExitCode;

use orthodrome_client::{Abort, Client, Config, Outcome, Priority, Reads, Writes};

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [endpoint, from, to, amount] = arguments.as_slice() else {
        eprintln!("usage: transfer HOST:PORT[,HOST:PORT…] FROM TO AMOUNT");
        return Ok(ExitCode::from(2));
    };
    let amount: i64 = amount.parse()?;
    let (from, to) = (format!("account/{from}"), format!("account/{to}"));

    let mut config = Config::new(endpoint.split(','));
    if let Ok(token) = std::env::var("ORTHODROME_TOKEN") {
        config = config.token(token);
    }
    let client = Client::connect(config).await?;

    // It is called again after a conflict, so it must only compute.
    let transfer = |reads: &Reads| {
        let balance = |account: &str| reads.text(account).unwrap_or("100").parse::<i64>();
        let left = balance(&from)? - amount;
        if left < 0 {
            return Err(Abort::because(format!("{from} is {} short", -left)));
        }
        let total = balance(&to)? + amount;
        Ok(Writes::new().put(from.as_str(), left.to_string()).put(to.as_str(), total.to_string()))
    };
    let outcome = client
        .transaction()
        .read(from.as_str())
        .read(to.as_str())
        .write(from.as_str())
        .write(to.as_str())
        .priority(Priority::HIGH)
        .run(transfer)
        .await?;

    // The outcome has three cases. "Unknown" is not "aborted": the money may have moved.
    let outcome = match outcome {
        Outcome::Unknown(doubt) => {
            eprintln!("{}: {}; asking again", doubt.txn(), doubt.trouble());
            doubt.resolve().await
        }
        known @ (Outcome::Committed(_) | Outcome::Aborted(_)) => known,
    };
    match outcome {
        Outcome::Committed(committed) => {
            let snapshot = client.read([from.as_str(), to.as_str()]).await?;
            println!("committed {}", committed.timestamp);
            for (account, balance) in snapshot.reads.iter() {
                println!("{account} = {}", balance.map(ToString::to_string).unwrap_or_default());
            }
            Ok(ExitCode::SUCCESS)
        }
        Outcome::Aborted(aborted) => {
            let because = aborted.because.unwrap_or_else(|| aborted.reason.to_string());
            println!("nothing moved: {because}");
            Ok(ExitCode::FAILURE)
        }
        Outcome::Unknown(doubt) => {
            println!("{} may have moved the money: {}", doubt.txn(), doubt.trouble());
            Ok(ExitCode::FAILURE)
        }
    }
}
