//! The table of docs/security.md against the protocol and these tests.

const SECURITY: &str = include_str!("../../../docs/security.md");
const PROTOCOL: &str = include_str!("../../../docs/protocol.md");
const TESTS: [&str; 4] = [
    include_str!("endings.rs"),
    include_str!("leases.rs"),
    include_str!("names.rs"),
    include_str!("sessions.rs"),
];

/// The rows of the first table after a heading, without its head: the cells of each.
fn rows(text: &'static str, heading: &str) -> Vec<Vec<&'static str>> {
    let section = text.split(heading).nth(1).expect("the heading");
    let lines = section.lines().skip_while(|line| !line.starts_with('|'));
    let rows = lines.take_while(|line| line.starts_with('|')).skip(2);
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect())
        .collect()
}

/// Returns the text between the first two backticks.
fn word(cell: &'static str) -> &'static str {
    cell.split('`').nth(1).unwrap_or(cell)
}

#[test]
fn every_cell_of_the_table_has_its_test() {
    let table = rows(SECURITY, "\n## Authorization\n");
    assert!(table.len() > 10, "{table:?}");
    let mut named = Vec::new();
    for row in &table {
        let test = word(row.last().expect("a cell"));
        let function = format!("#[test]\nfn {test}() {{");
        assert!(
            TESTS.iter().any(|text| text.contains(&function)),
            "no test {test}"
        );
        named.push(test);
    }
    for text in TESTS {
        for test in text.split("#[test]\nfn ").skip(1) {
            let test = test.split('(').next().expect("a name");
            assert!(named.contains(&test), "{test} is in no row");
        }
    }
}

#[test]
fn every_message_has_a_row() {
    let table = rows(SECURITY, "\n## Authorization\n");
    let requests = rows(PROTOCOL, "\n## Requests and replies\n");
    assert!(requests.len() > 8, "{requests:?}");
    // Tests of all requests send one of each but pings.
    let target = crate::authorization::requests::Target { name: "", lease: 0 };
    let sent = crate::authorization::requests::all(&target).len();
    assert_eq!(
        sent + 1,
        requests.len(),
        "tests/all/authorization/requests.rs"
    );
    let greetings = ["hello", "resume"].into_iter();
    for message in requests.iter().map(|row| word(row[0])).chain(greetings) {
        let mut found = table.iter().filter(|row| word(row[0]) == message);
        assert!(found.next().is_some(), "no row for {message}");
    }
}
