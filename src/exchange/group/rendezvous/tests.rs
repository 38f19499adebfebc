use super::*;

const SIZE: u32 = 100;

/// Returns a rank's place in a group without a secret.
fn place(address: &Address, rank: u32, size: u32) -> Place<'_> {
    let secret = None;
    Place {
        address,
        rank,
        size,
        secret,
    }
}
const LARGE: usize = 1 << 20;

/// Rank 1 sends nothing until the end. All others have sent by then: each in one piece, but for one whose contribution is
/// larger than a socket's buffer.
#[tokio::test]
async fn a_silent_rank_is_missing_alone() {
    let folder = tempfile::tempdir().unwrap();
    let address = Address::Unix(folder.path().join("socket"));
    let long = deadline(LONGEST);
    let mut ranks = JoinSet::new();
    for rank in 1..SIZE {
        let address = address.clone();
        ranks.spawn(async move {
            let mut link = place(&address, rank, SIZE).connect(long).await.unwrap();
            let bytes = if rank == SIZE / 2 { LARGE } else { 1 };
            if rank != 1 {
                link.writer.write(&vec![END; bytes], &[]).await.unwrap();
            }
            let reply = receive(&mut link.reader, MAX_FRAME).await.unwrap();
            assert!(matches!(decode(&reply), Ok(Reply::Missing(ranks)) if ranks == [1]));
        });
    }
    let mut links = place(&address, 0, SIZE).admit(long).await.unwrap();
    // From now on the clock moves only when no task can go on.
    tokio::time::pause();
    let gathered = collect(&mut links, vec![END], SIZE, deadline(PATIENCE)).await;
    let error = gathered.unwrap_err();
    assert!(
        matches!(&error, Error::RanksMissing { missing, .. } if *missing == [1]),
        "{error}"
    );
    while let Some(rank) = ranks.join_next().await {
        rank.unwrap();
    }
}

/// It has not sent all of its own bytes yet, and rank 0 reads no more of them.
#[tokio::test]
async fn a_late_rank_learns_which_ranks_are_missing() {
    let folder = tempfile::tempdir().unwrap();
    let address = Address::Unix(folder.path().join("socket"));
    let long = deadline(LONGEST);
    let own = address.clone();
    let late = tokio::spawn(async move {
        let mut link = place(&own, 1, 2).connect(long).await.unwrap();
        ask(&mut link, &vec![END; LARGE], 2, long).await
    });
    let mut links = place(&address, 0, 2).admit(long).await.unwrap();
    tokio::time::pause();
    tell_missing(&mut links, &[1]).await;
    let error = late.await.unwrap().unwrap_err();
    assert!(
        matches!(&error, Error::RanksMissing { missing, .. } if *missing == [1]),
        "{error}"
    );
}

/// Rank 1 has contributed more than a socket's buffer, and reads nothing.
#[tokio::test]
async fn a_rank_that_reads_no_answer_keeps_no_other_rank_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let address = Address::Unix(folder.path().join("socket"));
    let long = deadline(LONGEST);
    let own = address.clone();
    let stuck = tokio::spawn(async move {
        let mut link = place(&own, 1, 3).connect(long).await.unwrap();
        link.writer.write(&vec![END; LARGE], &[]).await.unwrap();
        link
    });
    let own = address.clone();
    let other = tokio::spawn(async move {
        let mut link = place(&own, 2, 3).connect(long).await.unwrap();
        ask(&mut link, &[END], 3, long).await
    });
    let mut links = place(&address, 0, 3).admit(long).await.unwrap();
    let answered = tokio::select! {
        gathered = collect(&mut links, vec![END], 3, long) => panic!("{gathered:?}"),
        answered = other => answered.unwrap().unwrap(),
        () = sleep(Duration::from_secs(300)) => panic!("rank 2 waits for rank 1"),
    };
    assert_eq!(answered, [vec![END], vec![END; LARGE], vec![END]]);
    drop(stuck);
}
