use super::*;

const SIZE: u32 = 100;
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
            let mut link = connect(&address, (rank, SIZE), None, long).await.unwrap();
            let bytes = if rank == SIZE / 2 { LARGE } else { 1 };
            if rank != 1 {
                link.writer.write(&vec![END; bytes], &[]).await.unwrap();
            }
            let reply = receive(&mut link, MAX_FRAME).await.unwrap();
            assert!(matches!(decode(&reply), Ok(Reply::Missing(ranks)) if ranks == [1]));
        });
    }
    let mut links = admit(&address, SIZE, None, long).await.unwrap();
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
