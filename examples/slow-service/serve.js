import { buildShop } from './shop.js'
import { startWarehouse } from './warehouse.js'

const warehouse = await startWarehouse()
const shop = await buildShop({ dataDir: '.spillway', warehouseUrl: warehouse.url })
console.log(`the shop listens on ${await shop.listen({ port: 3000, host: '127.0.0.1' })}`)

for (const signal of ['SIGINT', 'SIGTERM']) {
  process.once(signal, async () => {
    await shop.close()
    await warehouse.close()
  })
}
