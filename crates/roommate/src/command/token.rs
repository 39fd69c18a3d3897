//! `roommate token`: tokens for HTTP.

use crate::cli::machine::{Token, TokenCreate, TokenList, TokenRevoke, TokenScope};
use crate::{console, table};
use roommate_agent::api::caller::Scope;
use roommate_agent::api::control::{Reply, Request, TokenWanted};
use std::process::ExitCode;

pub(super) fn run(command: Token) -> anyhow::Result<ExitCode> {
    match command {
        Token::Create(args) => create(args),
        Token::List(args) => list(&args),
        Token::Revoke(args) => revoke(&args),
    }
}

fn create(args: TokenCreate) -> anyhow::Result<ExitCode> {
    let scope = match args.scope {
        TokenScope::Read => Scope::Read,
        TokenScope::Operate => Scope::Operate,
        TokenScope::Admin => Scope::Admin,
    };
    let client = super::machine::client(&args.at)?;
    let (name, user, expires_s) = (args.name, args.user, args.expires);
    let wanted = TokenWanted { name, user, scope, expires_s };
    let Reply::Token { secret, token } = client.ask(&Request::TokenCreate(Box::new(wanted)))?
    else {
        anyhow::bail!("unexpected reply from the daemon");
    };
    console::print(&format!("{secret}\n"))?;
    console::say_lines(&format!(
        "token {} of {}, scope {}, expires in {}; it is not shown again",
        token.id,
        token.user,
        token.scope,
        table::figure(Some(token.expires_in_s as f64), "s")
    ));
    Ok(ExitCode::SUCCESS)
}

fn list(args: &TokenList) -> anyhow::Result<ExitCode> {
    let reply = super::machine::client(&args.at)?.ask(&Request::TokenList {})?;
    let Reply::Tokens(tokens) = reply else {
        anyhow::bail!("unexpected reply from the daemon");
    };
    if super::machine::document(&tokens, args.output)? {
        return Ok(ExitCode::SUCCESS);
    }
    let head = ["id", "user", "scope", "expires in", "name"];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows.extend(tokens.into_iter().map(|t| {
        let expires = table::figure(Some(t.expires_in_s as f64), "s");
        vec![t.id, t.user, t.scope.to_string(), expires, t.name.unwrap_or_else(|| "-".into())]
    }));
    let text = if rows.len() == 1 { "no tokens\n".into() } else { table::align_left(&rows) };
    console::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn revoke(args: &TokenRevoke) -> anyhow::Result<ExitCode> {
    let client = super::machine::client(&args.at)?;
    for id in &args.ids {
        if let Reply::Done { what } = client.ask(&Request::TokenRevoke { id: id.clone() })? {
            console::say(&what);
        }
    }
    Ok(ExitCode::SUCCESS)
}
