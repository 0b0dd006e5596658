//! A waiting line, stored as a chain of keys. A step finds the keys that it touches only by
//! reading.
//!
//! ```text
//! cargo run -p orthodrome-client --example queue -- localhost:7400 join ada
//! cargo run -p orthodrome-client --example queue -- localhost:7400 join bob
//! cargo run -p orthodrome-client --example queue -- localhost:7400 next
//! ```
//!
//! `line/first` and `line/last` name people, and `line/after/NAME` names the person behind NAME. If
//! the cluster needs a token, set `ORTHODROME_TOKEN`.

use std::error::Error;
use std::process::ExitCode;

use orthodrome_client::{Abort, Client, Config, Outcome};

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let Some((endpoint, command)) = arguments.split_first() else {
        return Ok(usage());
    };
    let mut config = Config::new(endpoint.split(','));
    if let Ok(token) = std::env::var("ORTHODROME_TOKEN") {
        config = config.token(token);
    }
    let client = Client::connect(config).await?;
    let outcome = match command {
        ["join", name] => join(&client, name).await?,
        ["next"] => next(&client).await?,
        _ => return Ok(usage()),
    };
    // The outcome has three cases. "Unknown" is not "aborted": the line may have moved.
    let outcome = match outcome {
        Outcome::Unknown(doubt) => doubt.resolve().await,
        known @ (Outcome::Committed(_) | Outcome::Aborted(_)) => known,
    };
    Ok(match outcome {
        Outcome::Committed(committed) => {
            let reads = committed.reads.unwrap_or_default();
            match reads.text("line/first") {
                Some(first) => println!("{first} was first"),
                None => println!("the line was empty"),
            }
            ExitCode::SUCCESS
        }
        Outcome::Aborted(aborted) => {
            println!("{}", aborted.because.unwrap_or_else(|| aborted.reason.to_string()));
            ExitCode::FAILURE
        }
        Outcome::Unknown(doubt) => {
            println!("{} may have moved the line: {}", doubt.txn(), doubt.trouble());
            ExitCode::FAILURE
        }
    })
}

fn usage() -> ExitCode {
    eprintln!("usage: queue HOST:PORT[,HOST:PORT…] (join NAME | next)");
    ExitCode::from(2)
}

/// Adds `name` at the end of the line.
pub async fn join(client: &Client, name: &str) -> Result<Outcome, orthodrome_client::Error> {
    // It is called again after a conflict, so it must only read and compute.
    let step = |txn: orthodrome_client::GeneralTxn| async move {
        let ends = txn.get_all(["line/first", "line/last"]).await?;
        match ends.as_slice() {
            [Some(_), Some(last)] => {
                let behind = format!("line/after/{last}");
                if last.0 == name.as_bytes() || txn.get(behind.as_str()).await?.is_some() {
                    return Err(Abort::because(format!("{name} cannot stand behind {last}")));
                }
                txn.put(behind, name);
            }
            _ => txn.put("line/first", name),
        }
        txn.put("line/last", name);
        Ok(())
    };
    client.general().run(step).await
}

/// Takes the first person out of the line.
pub async fn next(client: &Client) -> Result<Outcome, orthodrome_client::Error> {
    let step = |txn: orthodrome_client::GeneralTxn| async move {
        let Some(first) = txn.text("line/first").await? else {
            return Err(Abort::because("nobody waits"));
        };
        let behind = format!("line/after/{first}");
        match txn.get(behind.as_str()).await? {
            Some(second) => txn.put("line/first", second),
            None => {
                txn.delete("line/first");
                txn.delete("line/last");
            }
        }
        txn.delete(behind);
        Ok(())
    };
    client.general().run(step).await
}
